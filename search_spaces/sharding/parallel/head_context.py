"""Positions over ranks, attention over heads and contexts (LoongTrain: double rings, balanced work)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainSerializer

from memtune import refusals
from memtune.parallel.model import HEAD_CONTEXT, Split, divide_sequence
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.sharding.parallel._sharded_layers import MicroBatchRotation
from memtune.technique import Plan, Reason, Target, Technique
from memtune.units import format_ranks
from memtune.workload import unsharded_in_blocks


class HeadContextPlan(Plan):
    """Division of every sequence over a group of ranks."""

    degree: Annotated[int, Field(ge=2)]
    """Ranks of a group."""
    split: Annotated[Split, PlainSerializer(Split.document)]
    """Ranks of a context, contexts, and their rings."""
    attention_heads: tuple[Annotated[int, Field(ge=1)], ...]
    """Numbers of heads in calls of attention."""


class HeadContext(MicroBatchRotation):
    """Trades messages in attention for 1/degree of all saved bytes of blocks, if heads or sequences alone
    divide too little.

    A group of degree = head_degree × contexts ranks computes one micro-batch; each rank has its share of
    every sequence, from the first block to the last, and all weights. In attention, the ranks of a context
    exchange heads for positions (two all-to-alls of queries, keys, values and outputs), and keys and values
    rotate over the contexts (`ring attention`), with results merged by their log-sum-exp. Embeddings, the
    last norm and the head see all positions.

    With causal masks `load_balance` decides how ranks get equal work. In zigzag it is equal, and blocks
    rotate over the full ring. With `work_sharing` contexts are contiguous (no sequence need divide twice) and
    blocks rotate over half the ring: ranks that have seen all their keys compute attention for others, and
    return the results. That is equal for odd numbers of contexts; for even ones, the first half has c/2 + 1/2
    blocks, one less.

    Where attention drops weights (`dropout_p`), each rank draws for all pairs of positions, as one rank does
    without a fused kernel, keeps those of its queries and heads as booleans, and computes scores in full:
    numbers are those of one rank, except where its own attention would run in a fused kernel of a GPU, which
    draws others of the same distribution. Long sequences want `dropout_p=0`.

    Reordered: softmax is that of the plain step, its sums over keys are taken context by context; a weight's
    gradient in the blocks is a sum of `degree` partial sums over the positions.
    """

    kind: Literal["head_context"] = "head_context"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (HeadContextPlan,)
    title: ClassVar[str] = "Positions divided over ranks, attention over heads and contexts"
    source: ClassVar[str] = (
        "Gu et al. 2024, LoongTrain, arXiv:2406.18485, sections 3 and 4; work sharing: Li et al. 2023,"
        " DistFlashAttn, arXiv:2310.03294"
    )
    paper: ClassVar[str] = "LoongTrain"

    head_degree: Annotated[int, Field(ge=1)] = 1
    """Ranks of a context, which divide attention heads; the group's other ranks have other contexts."""
    placement: Literal["head_first", "context_first"] = "head_first"
    """Neighbouring ranks: those that exchange heads, or those that exchange keys and values."""
    inner_ring: Annotated[int, Field(ge=2)] | Literal["node"] | None = None
    """Contexts of an inner ring, over which blocks rotate before they go to the next ring; `node`: those of a
    node; None: one ring.
    """
    load_balance: Literal["zigzag", "work_sharing", "none"] = "zigzag"
    """`zigzag`: a context has a piece from the front of the sequence and one from the back. `work_sharing`:
    contexts are contiguous, and the first ones compute attention for the last.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        heads = f", and attention's heads over {self.head_degree} of them" if self.head_degree > 1 else ""
        return f"divides the positions of a sequence over {format_ranks(self.degree)}{heads}"

    def split(self, ranks: int, node: int) -> Split | Reason:
        """Return the division over `ranks`, `node` of them on a node, or why there is none."""
        degree = self.degree or ranks
        if degree % self.head_degree:
            return Reason(
                f"head_degree={self.head_degree} does not divide the {degree} ranks of a group",
                "a divisor of the degree",
            )
        contexts = degree // self.head_degree
        context_first = self.placement == "context_first" and self.head_degree > 1 and contexts > 1
        zigzag = self.load_balance == "zigzag" and contexts > 1
        if self.load_balance == "work_sharing" and contexts > 2:
            if isinstance(self.inner_ring, int):
                return Reason("ranks that share work form no inner rings", "inner_ring: null")
            return Split(self.head_degree, contexts, contexts, context_first, zigzag=False, work_sharing=True)
        if self.inner_ring == "node":
            inner = min(node, contexts) if context_first else node // self.head_degree
            inner = inner if inner > 1 and contexts % inner == 0 else contexts
            return Split(self.head_degree, contexts, inner, context_first, zigzag)
        inner = self.inner_ring or contexts
        if self.inner_ring is not None and (not 1 < inner < contexts or contexts % inner):
            return Reason(
                f"inner_ring={self.inner_ring} does not divide a ring of {contexts} contexts into several",
                "a proper divisor of degree / head_degree",
            )
        return Split(self.head_degree, contexts, inner, context_first, zigzag)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require the conditions of shared layers, and degrees that divide groups, heads and positions."""
        split = self.split(target.ranks, target.hardware.local_ranks(target.ranks))
        if isinstance(split, Reason) and target.ranks > 1:
            return split
        return super().fits(program, target)

    def sharding_kind(self, target: Target) -> str:
        """Return the division by name."""
        return HEAD_CONTEXT + self._recorded_split(target).name

    def _split(self, target: Target) -> Split:
        split = self.split(target.ranks, target.hardware.local_ranks(target.ranks))
        assert isinstance(split, Split), "fits refuses what cannot be divided"
        return split

    def _recorded_split(self, target: Target) -> Split:
        """Return the division to record; placements share a recording if a group shares a node."""
        split, node = self._split(target), target.hardware.local_ranks(target.ranks)
        return replace(split, context_first=split.context_first and split.ranks > node)

    def plan(self, program: Program, target: Target) -> Plan:
        return HeadContextPlan(**{**self._recorded(target).fields, "split": self._split(target)})

    def _refuse_states(self, states: Technique, target: Target) -> Reason | None:
        return None  # weights are replicated, so states can be sharded over all ranks

    def summed(self, program: Program, plan: HeadContextPlan) -> frozenset[str]:
        """Return the trainable parameters of the blocks."""
        step = program.step
        return frozenset(
            unsharded_in_blocks((p.name for p in step.parameters if p.trainable), (), step.blocks)
        )

    def apply(self, context: Context, plan: HeadContextPlan) -> None:
        """Divide the positions as planned."""
        divide_sequence(context, self._planned(context, plan))

    def _planned(self, context: Context, plan: HeadContextPlan) -> Split:
        """Return the division of `plan`, if it is that of the config."""
        planned, wanted = plan.split, self.split(context.placement.world_size, context.placement.world_size)
        if self.inner_ring == "node" and isinstance(wanted, Split):
            wanted = replace(wanted, inner=planned.inner)  # as many as the planned node's
        if planned != wanted:
            actual = (
                wanted.text
                if isinstance(wanted, Reason)
                else f"The config has {wanted.heads} × {wanted.contexts}, in rings of {wanted.inner}."
            )
            raise refusals.plan_of_other_model(
                f"sharding.parallel: {{kind: {self.kind}}}",
                f"It is for {planned.heads} × {planned.contexts} ranks, in rings of {planned.inner}."
                f" {actual}",
            )
        return planned

    def explain(self, plan: HeadContextPlan) -> tuple[str, ...]:
        split = plan.split
        rings = "" if split.inner == split.contexts else f", in inner rings of {split.inner}"
        rings += ", the first of which attend for the last" if split.work_sharing else ""
        return (
            (
                f"{split.ranks} ranks share every sequence: {split.heads} with some heads each ×"
                f" {split.contexts} contexts{rings}"
            ),
            "each rank provides its own micro-batches, which the group computes one by one",
        )

    def record(self, target: Target) -> dict[str, Any]:
        return {"parallel.head_context": self._split(target).document()}

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """Return all ranks and nodes' sizes, divisors for heads; over nodes, placements and inner rings."""
        node = target.hardware.local_ranks(target.ranks)
        several = node < target.ranks
        return {
            **super().choices_on(target),
            "head_degree": tuple(each for each in range(1, node + 1) if node % each == 0),
            "placement": ("head_first", "context_first") if several else ("head_first",),
            "inner_ring": ("node",) if several else (None,),
            "load_balance": ("zigzag", "work_sharing"),
        }
