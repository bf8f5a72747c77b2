"""Coordinated copies of replicas that share one link to the host (Tensor Movement Orchestration)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune import refusals
from memtune.effects import Effects
from memtune.offload.optimizer import optimizer_on_host
from memtune.offload.parameters import (
    Orchestrated,
    not_in_layers,
    place_of,
    stream_weights,
    streamed_parameters,
    swapped_blocks,
)
from memtune.program import Kind, Program, RankClass, Step, window_residency
from memtune.runtime import Context
from memtune.search_spaces._support import conflict
from memtune.search_spaces.offload.states._common.layer_rules import EAGER_ONLY
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique
from memtune.units import MIB

_MOST_RANK_CLASSES = 8
"""Ranks up to which each is its own rank class; more are priced as if all copied at the same time."""


class OrchestratedPlan(Plan):
    """Ranks that share a link, and blocks that are offloaded; the knobs give missing values."""

    group: Annotated[int, Field(ge=2)] | None = None
    """Ranks behind one link."""
    stride: Annotated[int, Field(ge=1)] | None = None
    """One block in `stride` is offloaded."""


class TensorMovement(Technique):
    """Trades the order of copies, and nothing else, for the time that ranks under one PCIe root complex lose
    to each other.

    Data-parallel replicas load the same layers at the same time, and each copy takes as long as all of them
    together. Here the weights of one block in `stride` are offloaded to the host and loaded for its forward
    and its backward, prefetched by `window` - 1 blocks; the optimizer is on the host as well. `disjoint`:
    ranks of one link offload different blocks (rank r those with r modulo the stride), so that their copies
    interleave. `token`: all offload the same blocks, but each piece of a copy needs the link's token, a
    ticket in shared memory, which a dead process returns. `none` does neither, for comparison. Off if each
    device has its own link, unless `group` is given.

    Bitwise against the same replicas with the optimizer on the host: only the place of weights differs.
    """

    kind: Literal["orchestrated"] = "orchestrated"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (OrchestratedPlan,)
    title: ClassVar[str] = "Weights of some layers on the host, copies of one link coordinated"
    source: ClassVar[str] = (
        "Lin et al. 2023, Tensor Movement Orchestration in Multi-GPU Training Systems, HPCA 23, disjoint"
        " selection and command orchestration"
    )
    paper: ClassVar[str] = "Lin et al. 2023"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(
        calls="block_hooks", moves="block", eager_only=EAGER_ONLY, host_share=1.0
    )

    mode: Literal["disjoint", "token", "none"] = "disjoint"
    """Different blocks on each rank; the same ones, one copy at a time; or the same ones at once."""
    group: Annotated[int, Field(ge=2, le=64)] | None = None
    """Ranks of one link. Default: from the hardware."""
    stride: Annotated[int, Field(ge=1)] | None = None
    """One block in `stride` is offloaded; less frees more. Default: the group's size, so that each block is
    offloaded on one rank of the link.
    """
    window: Annotated[int, Field(ge=1)] = 2
    """Distance in blocks from the one that computes to the one that is loaded; 1 waits for each copy."""
    slot_mib: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most bytes of a copy during one hold of the token; small pieces are fairer and cost more requests."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        some = "some blocks" if self.stride is None else f"one block in {self.stride}"
        copies = {"disjoint": "other ones on each rank", "token": "copied by one rank at a time"}
        how = copies.get(self.mode, "copied by all ranks at once")
        return f"keeps the weights of {some} in host memory, {how}"

    def refuses(self, facts: Facts) -> Reason | None:
        return _too_many_blocks(facts.blocks, self.stride or 1, self.window)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require replicas behind one link, and blocks that run one after the other."""
        if target.compiled:
            return Reason(EAGER_ONLY, "execution.compile: false")
        if target.ranks < 2:
            return Reason("one rank has the link to itself", "offload: {states: {kind: stronghold}}")
        if self._group(target) < 2:
            return Reason(
                "each device has its own link to the host", "group: 2, if the hardware says otherwise"
            )
        if (reason := conflict(self, target, "sharding.states")) is not None:
            return reason
        return self._blocks_fit(program.step, target)

    def _blocks_fit(self, step: Step, target: Target) -> Reason | None:
        if (reason := not_in_layers(step, when_ready=False)) != "":
            return Reason(reason, "offload: {states: {kind: optimizer_cpu}}")
        if not (step.storages.kind == Kind.OPTIMIZER).any():
            return refusals.no_optimizer_state()
        blocks, stride = len(step.blocks), self._stride(self._group(target))
        if (too_many := _too_many_blocks(blocks, stride, self.window)) is not None:
            return too_many
        # Rank r offloads the blocks that are r modulo the stride.
        if self.mode == "disjoint" and stride < self._group(target):
            return Reason(
                f"a stride of {stride} gives {self._group(target)} ranks the same blocks",
                f"stride: {self._group(target)}",
            )
        return None

    def plan(self, program: Program, target: Target) -> OrchestratedPlan:
        group = self._group(target)
        return OrchestratedPlan(group=group, stride=self._stride(group))

    def rewrite(self, program: Program, plan: OrchestratedPlan, target: Target) -> Program:
        """Load and free the weights of each rank's blocks, optimizer on the host; ranks may differ."""
        group, stride = plan.group, plan.stride
        assert group is not None, "`plan` decides both"
        assert stride is not None
        node, ranks = target.hardware.local_ranks(target.ranks), program.ranks
        # Without coordination the steps of all ranks are equal: one class represents them.
        if self.mode == "none":
            return program.with_step(self._swap_blocks(program.step, stride, 0))
        # Each rank class is simulated op by op, so the time of a search grows with their number.
        if ranks > _MOST_RANK_CLASSES:
            note = "ranks behind one link are priced as if they copied at the same time"
            return program.with_step(self._swap_blocks(program.step, stride, 0), notes=(*program.notes, note))
        places = [place_of(rank, node, group) if self.mode == "disjoint" else 0 for rank in range(ranks)]
        # Ranks that load other blocks reach a collective at other times, and the first one waits for the
        # last.
        plain = _with_matched_collectives(program.step)
        steps = {place: self._swap_blocks(plain, stride, place) for place in sorted(set(places))}
        classes = tuple(RankClass(1, steps[place]) for place in places)
        return replace(program, rank_classes=classes, serial_copies=self.mode == "token")

    def _swap_blocks(self, step: Step, stride: int, place: int) -> Step:
        blocks = swapped_blocks(len(step.blocks), stride, place)
        streamed = streamed_parameters(step, blocks)
        return optimizer_on_host(
            stream_weights(step, window_residency(len(step.blocks), self.window), blocks),
            with_offloader=streamed,
        )

    def apply(self, context: Context, plan: OrchestratedPlan) -> None:
        """Move blocks' weights to the host, add hooks that load them, and share the token."""
        group = plan.group or self.group
        stride, blocks = plan.stride or self.stride or group, len(context.blocks)
        evidence = f"The plan has a group of {group} and a stride of {stride}."
        if group is None or stride is None:
            raise refusals.plan_of_other_model("offload.states: {kind: orchestrated}", evidence, "group: 2")
        if (reason := _too_many_blocks(blocks, stride, self.window)) is not None:
            raise refusals.error_of(reason, evidence)
        moved = Orchestrated(
            context,
            group=group,
            stride=stride,
            slots=self.window,
            disjoint=self.mode == "disjoint",
            slot_bytes=self.slot_mib * MIB if self.mode == "token" else 0,
        )
        context.checks["offload.states"] = moved.check

    def explain(self, plan: OrchestratedPlan) -> tuple[str, ...]:
        if plan.group is None or plan.stride is None:
            return ()
        how = {
            "disjoint": "each offloads other blocks",
            "token": "one copy at a time",
            "none": "not coordinated",
        }[self.mode]
        return (f"{plan.group} ranks share a link, {how}; one block in {plan.stride} is offloaded",)

    def record(self, target: Target) -> dict[str, Any]:
        group = self._group(target)
        knobs = {
            "orchestrated": self.mode,
            "group": group,
            "stride": self._stride(group),
            "slots": self.window,
        }
        slot = {"slot_mib": self.slot_mib} if self.mode == "token" else {}
        return {
            "states.offload": {
                "parameters": "host",
                "optimizer": "host",
                "trigger": "end_of_step",
                **knobs,
                **slot,
            }
        }

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"mode": ("disjoint", "token")}

    def _group(self, target: Target) -> int:
        per_root = self.group if self.group is not None else target.hardware.gpus_per_pcie_root
        # A root complex is part of one node.
        return min(per_root, target.hardware.local_ranks(target.ranks))

    def _stride(self, group: int) -> int:
        return group if self.stride is None else self.stride


def _too_many_blocks(blocks: int, stride: int, window: int) -> Reason | None:
    """Return why one block in `stride` and a window of `window` exceed a model of `blocks`."""
    return (
        refusals.few_blocks(blocks, "a smaller stride and window") if max(stride, window) > blocks else None
    )


def _with_matched_collectives(step: Step) -> Step:
    """Return `step` with numbered collectives, in which ranks with differing steps wait for each other."""
    talk = step.ops.group > 1
    return step.with_ops(match=np.where(talk, np.cumsum(talk), step.ops.match).astype(np.int32))
