"""Positions divided over ranks, attention over heads and contexts (LoongTrain: double rings, equal work)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainSerializer

from memtune.parallel.model import HEAD_CONTEXT, Split, divide_sequence
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.sharding.parallel._sharded_layers import TakingTurns, of_another
from memtune.technique import Plan, Reason, Target, Technique
from memtune.workload import whole_in_blocks


class HeadContextPlan(Plan):
    """How a group of ranks shares every sequence."""

    degree: Annotated[int, Field(ge=2)]
    """Ranks of a group."""
    split: Annotated[Split, PlainSerializer(Split.document)]
    """Ranks of a context, contexts, and their rings."""
    attention_heads: tuple[Annotated[int, Field(ge=1)], ...]
    """Numbers of heads that attention is called with."""


class HeadContext(TakingTurns):
    """Trades messages in attention for 1/degree of all that the blocks save, where heads or sequences alone
    divide too little.

    A group of degree = head_degree × contexts ranks works on one micro-batch; each rank has its share of
    every sequence, from the first block to the last, and all weights. In attention, the ranks of a context
    exchange heads for positions (two all-to-alls of queries, keys, values and outputs), and keys and values
    go round the contexts: `ring attention`, its results merged by their log-sum-exp. Embeddings, the last
    norm and the head see all positions.

    Where later positions are masked, `balance` says how ranks come to equal work. In zigzag it is equal, and
    blocks go all the way round. With `helpers` contexts follow one another (no sequence need divide twice)
    and nothing goes more than half round: ranks that have seen all their keys attend for others, and send
    back what they find. That is equal for odd contexts; for even ones, the first half has one block of c/2 +
    1/2 less to do.

    Reordered: softmax is that of the plain step, its sums over keys are taken context by context; a weight's
    gradient in the blocks is a sum of `degree` partial sums over the positions.

    Distinguishing test: a rank saves 1/degree of what the blocks save, and where it exchanges heads
    attention's output of its own positions once more. With Q and K the bytes of its own queries and keys, an
    attention sends 4·(Q + K)·(h - 1)/h in all-to-alls and 6·K·(c - 1) in rings (h ranks a context, c
    contexts; 16-bit keys 8·K, as their gradients go round in fp32). With helpers the last context, which gets
    most, receives 4·K·⌊c/2⌋ + (2·Q + L)·⌊(c - 1)/2⌋ (L of a log-sum-exp).
    """

    kind: Literal["head_context"] = "head_context"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (HeadContextPlan,)
    title: ClassVar[str] = "Positions divided over ranks, attention over heads and contexts"
    source: ClassVar[str] = (
        "Gu et al. 2024, LoongTrain, arXiv:2406.18485, sections 3 and 4; helpers: Li et al. 2023,"
        " DistFlashAttn, arXiv:2310.03294"
    )

    head_degree: Annotated[int, Field(ge=1)] = 1
    """Ranks of a context, which divide the heads of attention; the others of the group have other contexts.
    """
    placement: Literal["head_first", "context_first"] = "head_first"
    """Which ranks are neighbours: those that exchange heads, or those that pass keys and values on."""
    inner_ring: Annotated[int, Field(ge=2)] | Literal["node"] | None = None
    """Contexts of an inner ring, round which blocks go on their way to the next one; `node`: those of one;
    None: one ring.
    """
    balance: Literal["zigzag", "helpers", "none"] = "zigzag"
    """Contexts have a piece from the front and one from the back; or they follow one another, the first ones
    helping the last.
    """

    def split(self, ranks: int, node: int) -> Split | Reason:
        """The settings that count, of `ranks` in all with `node` of them on a node; or why there are none."""
        degree = self.degree or ranks
        if degree % self.head_degree:
            return Reason(
                f"head_degree={self.head_degree} does not divide the {degree} ranks of a group",
                "a divisor of the degree",
            )
        contexts = degree // self.head_degree
        context_first = self.placement == "context_first" and self.head_degree > 1 and contexts > 1
        zigzag = self.balance == "zigzag" and contexts > 1
        if self.balance == "helpers" and contexts > 2:
            if isinstance(self.inner_ring, int):
                return Reason("ranks that help each other are no rings", "inner_ring: null")
            return Split(self.head_degree, contexts, contexts, context_first, zigzag=False, helpers=True)
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
        """As of others that share layers; needs a head degree and inner rings that divide their groups, heads
        and positions.
        """
        split = self.split(target.ranks, target.hardware.local_ranks(target.ranks))
        if isinstance(split, Reason) and target.ranks > 1:
            return split
        return super().fits(program, target)

    def asked(self, target: Target) -> str:
        """The split, by name."""
        return HEAD_CONTEXT + self._recorded_split(target).name

    def _split(self, target: Target) -> Split:
        split = self.split(target.ranks, target.hardware.local_ranks(target.ranks))
        assert isinstance(split, Split), "fits refuses what cannot be divided"
        return split

    def _recorded_split(self, target: Target) -> Split:
        """Placements are one where all ranks of a group share a node."""
        split, node = self._split(target), target.hardware.local_ranks(target.ranks)
        return replace(split, context_first=split.context_first and split.ranks > node)

    def plan(self, program: Program, target: Target) -> Plan:
        """The split, as the recording has shown that it may be."""
        return HeadContextPlan(**{**self._recorded(target).fields, "split": self._split(target)})

    def _not_beside(self, states: Technique, target: Target) -> Reason | None:
        return None  # weights are whole: states are divided over all ranks, whatever they work on together

    def summed(self, program: Program, plan: HeadContextPlan) -> frozenset[str]:
        """Trainable parameters of the blocks."""
        step = program.step
        return frozenset(whole_in_blocks((p.name for p in step.parameters if p.trainable), (), step.blocks))

    def apply(self, context: Context, plan: HeadContextPlan) -> None:
        """Divide the positions as the plan says."""
        divide_sequence(context, self._planned(context, plan))

    def _planned(self, context: Context, plan: HeadContextPlan) -> Split:
        """The split that `plan` was made for, where that is this one."""
        planned, wanted = plan.split, self.split(context.placement.world_size, context.placement.world_size)
        if self.inner_ring == "node" and isinstance(wanted, Split):
            wanted = replace(wanted, inner=planned.inner)  # as many as the planned node's
        if planned != wanted:
            said = (
                wanted.text
                if isinstance(wanted, Reason)
                else f"Here are {wanted.heads} × {wanted.contexts}, in rings of {wanted.inner}."
            )
            raise of_another(
                self.kind,
                f"It is for {planned.heads} × {planned.contexts} ranks, in rings of {planned.inner}. {said}",
            )
        return planned

    def explain(self, plan: HeadContextPlan) -> tuple[str, ...]:
        """How many ranks share each sequence, and how."""
        split = plan.split
        rings = "" if split.inner == split.contexts else f", in inner rings of {split.inner}"
        rings += ", the first of which attend for the last" if split.helpers else ""
        return (
            (
                f"{split.ranks} ranks share every sequence: {split.heads} with some heads each ×"
                f" {split.contexts} contexts{rings}"
            ),
            "each rank brings its own micro-batches, and they take turns",
        )

    def record(self, target: Target) -> dict[str, Any]:
        """How ranks share a sequence."""
        return {"parallel.head_context": self._split(target).document()}

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """All ranks and sizes of a node, its divisors for heads; placements and inner rings where there are
        several nodes.
        """
        node = target.hardware.local_ranks(target.ranks)
        several = node < target.ranks
        return {
            **super().choices_on(target),
            "head_degree": tuple(each for each in range(1, node + 1) if node % each == 0),
            "placement": ("head_first", "context_first") if several else ("head_first",),
            "inner_ring": ("node",) if several else (None,),
            "balance": ("zigzag", "helpers"),
        }
