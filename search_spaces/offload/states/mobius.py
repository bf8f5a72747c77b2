"""Stages over all micro-batches, with the next one prefetched while one computes (Mobius)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune import refusals
from memtune.effects import Effects
from memtune.hardware import Hardware, op_costs
from memtune.offload.core import BlockTimes, deferred_blocks
from memtune.offload.layer_major import Packs, Span, StageLayout, parts_of, spans
from memtune.offload.multiplexed import StageCosts, fastest_stages, memory_bytes
from memtune.offload.parameters import native_update_bytes
from memtune.program import F64, Program, Step, columns_of, memoized
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.block_sizes import block_bytes
from memtune.search_spaces.offload.states._common.layer_rules import EAGER_ONLY
from memtune.search_spaces.offload.states._common.multiplexed_technique import (
    StagesPlan,
    apply_stages,
    cannot_run_stages,
    costs_of,
    on_ranks,
    partitions,
    solve_within,
    stages_plan_fields,
    wrong_ranks_error,
)
from memtune.search_spaces.offload.states._common.pack_technique import (
    PacksPlan,
    apply_packs,
    cannot_run_packs,
    in_packs,
    within_budget,
)
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique
from memtune.units import format_bytes

_SHARES = (0.25, 0.33, 0.5, 0.67)
"""Shares of the stages to defer, evenly spread, that are tried as well."""


class MobiusPlan(PacksPlan):
    """Stages of one rank, and the bytes that they copy; the packs of backward are the stages."""

    stages: Annotated[int, Field(ge=1)]
    """Number of stages."""
    moved_bytes: Annotated[int, Field(ge=0)]
    """Bytes of weights reloaded and gradients offloaded per step."""
    deferred: tuple[Annotated[int, Field(ge=0)], ...]
    """Blocks with deferred updates, which overlap with the next step's forward, ascending."""

    def packs(self, **settings: Any) -> Packs:
        """Return the stages, with the blocks of deferred updates."""
        return super().packs(deferred=self.deferred, **settings)


class MobiusStagesPlan(StagesPlan):
    """Stages that several ranks run by rotation."""

    stages: Annotated[int, Field(ge=1)]
    """Number of stages, of all ranks together."""
    deferred: tuple[Annotated[int, Field(ge=0)], ...]
    """Blocks with deferred updates, which overlap with the next step's forward, ascending."""

    def layout(self, **settings: Any) -> StageLayout:
        """Return the stages on their ranks, with the blocks of deferred updates."""
        return super().layout(deferred=self.deferred, **settings)


class Mobius(Technique):
    """Trades one more forward for the blocks' weights, gradients and state, and overlaps copies of weights
    with compute.

    Blocks are joined to stages, more than there are devices, which run them round-robin. All micro-batches of
    a stage run before the next one; meanwhile the next stage's weights are prefetched, in forward and
    backward, so two stages' weights are on the device. Stage inputs are kept on the host. Backward runs a
    stage's forward again; its gradients are offloaded once and the host updates it at once. Updates that the
    host cannot finish in backward are deferred: they overlap with the next step's forward, and each ends
    before its weights are loaded; the planner chooses the blocks. A step copies the weights twice, except the
    last stage's, which are resident between forward and backward, and the gradients once: 2|W| - |W of the
    last stage| + |gradients|. The planner is exact: it finds the partition of smallest step time under which
    a stage, the prefetched weights, its gradients and its activations stay within the budget.

    On g ranks stage j is on the rank of place j mod g, and each rank holds its stages alone. Ranks bring
    their own micro-batches and all ranks work on all of them, in turn; gradients add up in that order, where
    DDP adds up each rank's own first. Activations between stages pass through the hosts. The last stage of
    each rank is resident between its forward and its backward. Cross mapping places ranks so that consecutive
    stages are under different root complexes. The partition is then the fastest one into a multiple of g
    stages under which each rank stays within the budget: of all partitions if they are few, else the best
    found from even ones (`offload.multiplexed.stage_partition_planner`). Forward and backward have the same
    stages, since a block's weights are on one rank's host. Such a config is written by hand, with `sharding:
    {states: {kind: none}}`.
    """

    kind: Literal["mobius"] = "mobius"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (MobiusPlan, MobiusStagesPlan)
    title: ClassVar[str] = "Stages in turn, the next one prefetched"
    clause: ClassVar[str] = (
        "keeps the blocks in host memory, and runs stages of them in turn while the next is copied in"
    )
    source: ClassVar[str] = (
        "Feng et al. 2023, Mobius: Fine Tuning Large-Scale Models on Commodity GPU Servers, ASPLOS 23"
    )
    paper: ClassVar[str] = "Mobius"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(
        averages="all",
        calls="block_hooks",
        layer_major=True,
        moves="block",
        parameters_on="host",
        eager_only=EAGER_ONLY,
        host_share=1.0,
    )

    stages: Annotated[int, Field(ge=1)] | None = None
    """Number of stages, on several ranks a multiple of them. Default: solved, on several ranks with `--axes
    sharding.parallel`.
    """
    mapping: Literal["cross", "in_order"] = "cross"
    """Placement of stages on ranks: under another root complex than their neighbours, or rank by rank."""
    deferred: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Blocks updated in the next step's forward. Default: solved; []: all updates end within the step."""

    def refuses(self, facts: Facts) -> Reason | None:
        if facts.ranks == 1 and self.stages is not None and self.stages > facts.blocks:
            return refusals.few_blocks(facts.blocks, "fewer stages, or none to have them solved")
        return refusals.no_block_to_defer(self.deferred or (), facts.blocks)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require a chain of blocks without random numbers and statistics, in float32, and enough blocks."""
        if (reason := self.refuses(Facts.of(program, target))) is not None:
            return reason
        if target.ranks > 1:
            if self.stages is None and not target.plans_parallel("pipeline"):
                return Reason(
                    "stages on several ranks are solved on request only",
                    "stages: a multiple of the ranks, or --axes sharding.parallel,offload.states",
                )
            return cannot_run_stages(self, program, target, self.stages)
        return cannot_run_packs(self, program, target)

    def plan(self, program: Program, target: Target) -> MobiusPlan | MobiusStagesPlan:
        hardware, deferred = target.hardware, self.deferred
        if program.ranks > 1:
            layout = _on_ranks(program, hardware, target.budget_bytes, self.stages, self.mapping == "cross")
            deferred = _deferred_on_ranks(program, hardware, layout) if deferred is None else deferred
            return MobiusStagesPlan(
                **stages_plan_fields(program, layout),
                stages=len(layout.stages),
                deferred=tuple(sorted(deferred)),
            )
        packs = _solved(program, hardware, target.budget_bytes, self.stages)
        deferred = _deferred(program, hardware, packs) if deferred is None else deferred
        return MobiusPlan(
            forward=packs.forward,
            backward=packs.backward,
            stages=len(packs.backward),
            moved_bytes=_copied_bytes(program, packs),
            deferred=tuple(sorted(deferred)),
        )

    def rewrite(self, program: Program, plan: MobiusPlan | MobiusStagesPlan, target: Target) -> Program:
        """Run all micro-batches stage by stage."""
        if isinstance(plan, MobiusStagesPlan):
            return on_ranks(program, plan.layout(prefetch=True), target.hardware)
        return in_packs(program, plan.packs(prefetch=True), "host")

    def apply(self, context: Context, plan: MobiusPlan | MobiusStagesPlan) -> None:
        """Move weights and optimizer to the host; `Tuned.step` runs stages."""
        if context.placement.world_size > 1:
            apply_stages(context, plan, self.kind, prefetch=True)
            return
        if isinstance(plan, MobiusStagesPlan):
            raise wrong_ranks_error(context, self.kind)
        apply_packs(context, plan.packs(prefetch=True), "host", self.kind)

    def explain(self, plan: MobiusPlan | MobiusStagesPlan) -> tuple[str, ...]:
        rest = (f"{len(plan.deferred)} blocks with deferred updates",) if plan.deferred else ()
        if isinstance(plan, MobiusStagesPlan):
            return plan.explain() + rest
        moved = f"{format_bytes(plan.moved_bytes)} of weights and gradients copied per step"
        return (f"{plan.stages} stages over all micro-batches, {moved}", *rest)

    def record(self, target: Target) -> dict[str, Any]:
        settings: dict[str, Any] = {"stages": self.stages or "solved", "boundaries": "host", "prefetch": True}
        settings |= {"mapping": self.mapping} if target.ranks > 1 else {}
        settings |= {"deferred": "solved" if self.deferred is None else list(self.deferred)}
        return {
            "states.offload": {
                "parameters": "host",
                "optimizer": "host",
                "trigger": "in_backward",
                "packs": settings,
            }
        }


@functools.lru_cache(maxsize=64)
def _deferred(program: Program, hardware: Hardware, packs: Packs) -> tuple[int, ...]:
    """Return the blocks whose updates one host cannot finish in backward."""
    costs = _costs(program, hardware)
    return _deferred_in_stages(program, hardware, packs.backward, costs.forward_s, costs.backward_s)


@functools.lru_cache(maxsize=32)
def _deferred_on_ranks(program: Program, hardware: Hardware, layout: StageLayout) -> tuple[int, ...]:
    """Return the same for all ranks, which share one host."""
    # Other ranks compute while a rank loads, so a stage takes its compute time.
    costs, count = costs_of(program.step, hardware), program.accumulate * program.ranks
    forward, backward = ([count * each for each in column] for column in (costs.forward_s, costs.backward_s))
    found = [
        _deferred_in_stages(
            program, hardware, [layout.stages[stage] for stage in layout.stages_of(rank)], forward, backward
        )
        for rank in range(program.ranks)
    ]
    return tuple(sorted(block for each in found for block in each))


def _copied_bytes(program: Program, packs: Packs) -> int:
    """Return the bytes of weights loaded and gradients offloaded in one step."""
    weights, gradients = block_bytes(program.step)[:2]
    # Down in forward and again in backward, but for the last stage, which is resident in between.
    return 2 * sum(weights) - sum(weights[slice(*packs.turnaround)]) + sum(gradients)


@functools.lru_cache(maxsize=64)
def _solved(program: Program, hardware: Hardware, budget_bytes: int | None, count: int | None) -> Packs:
    """Return the fastest stages within the budget by the pass; else single blocks, which need least."""
    costs, other_bytes = _costs(program, hardware), block_bytes(program.step).other
    smallest = spans([1] * len(costs.weights))
    if budget_bytes is None:
        return _stages_as_packs(fastest_stages(costs, count=count) or smallest)

    # `fastest_stages` counts blocks only, so the step's other bytes are subtracted from the budget.
    def solve(room: F64) -> tuple[Span, ...] | None:
        return fastest_stages(costs, min(float(room[0]), budget_bytes - other_bytes), count)

    def needed(stages: tuple[Span, ...]) -> F64:
        return np.array([float(memory_bytes(costs, stages))])

    def peaks(stages: tuple[Span, ...]) -> F64:
        return np.array([float(in_packs(program, _stages_as_packs(stages), "host").step.peak_bytes())])

    found = within_budget(solve, needed, peaks, budget_bytes)
    return _stages_as_packs(
        found or (smallest if count is None else fastest_stages(costs, math.inf, count) or smallest)
    )


@functools.lru_cache(maxsize=32)
def _on_ranks(
    program: Program, hardware: Hardware, budget_bytes: int | None, count: int | None, crossed: bool
) -> StageLayout:
    """Return the fastest partition that fits; if none does, the one into most stages that needs least."""
    # Round-robin: a multiple of the ranks, from one stage for each to one for each block.
    counts = [count] if count else list(range(program.ranks, len(program.step.blocks) + 1, program.ranks))
    each = partitions(program, hardware, prefetch=True, crossed=crossed)
    found = solve_within(
        program, hardware, budget_bytes, "host", lambda room: each.fastest(counts, room), each
    )
    return found or each.smallest(counts)


def _stages_as_packs(stages: tuple[Span, ...]) -> Packs:
    # The last stage's forward is part of its backward: it is resident in between.
    return Packs(stages[:-1], stages, prefetch=True)


@functools.lru_cache(maxsize=32)
def _costs(program: Program, hardware: Hardware) -> StageCosts:
    """Return the seconds and bytes of each block, over all micro-batches of a step."""
    step, sizes = program.step, block_bytes(program.step)
    seconds, parts = op_costs(step, hardware).op_s, parts_of(step)
    forward, backward = (
        [program.accumulate * float(np.sum(seconds[rows])) for rows in blocks]
        for blocks in (parts.forward, parts.backward)
    )
    load = [n_bytes / hardware.host_to_device_bytes_per_s for n_bytes in sizes.weights]
    return StageCosts(forward, backward, load, sizes.weights, sizes.gradients, sizes.saved)


def _deferred_in_stages(
    program: Program,
    hardware: Hardware,
    stages: Sequence[Span],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
) -> tuple[int, ...]:
    """Return the blocks whose updates the host cannot finish in a rank's backward, which runs `stages` one by
    one (`offload.core.deferred_updates_plan`).

    Args:
        program: The program before the rewrite, of one rank or of ranks that load, offload and update at the
            same time.
        hardware: Hardware with its links and host.
        stages: Stages of the rank, in forward order.
        forward_s: Seconds of each block, of all micro-batches of the step.
        backward_s: The same for backward, without the forward that recomputes it.
    """
    sizes, local = block_bytes(program.step), hardware.local_ranks(program.ranks)
    # Ranks behind one root complex load at the same time, and share its bandwidth.
    sharing = min(local, hardware.gpus_per_pcie_root) if hardware.device != "cpu" else 1
    forward, backward = (_of_stages(each, stages) for each in (forward_s, backward_s))
    up, down = sharing / hardware.host_to_device_bytes_per_s, sharing / hardware.device_to_host_bytes_per_s
    times = BlockTimes(
        forward_s=forward.tolist(),
        # Backward runs a stage's forward again.
        backward_s=(forward + backward).tolist(),
        outside_s=0.0,
        load_s=(_of_stages(sizes.weights, stages) * up).tolist(),
        down_s=(_of_stages(sizes.gradients, stages) * down).tolist(),
        # The host's cores update for all its ranks.
        update_s=_of_stages(_update_s(program.step, hardware) * local, stages).tolist(),
    )
    deferred = deferred_blocks(times, _SHARES)
    return tuple(block for stage in sorted(deferred) for block in range(*stages[stage]))


def _of_stages(column: Sequence[float] | F64, stages: Sequence[Span]) -> F64:
    return np.array([sum(column[first:end]) for first, end in stages], np.float64)


@memoized
def _update_s(step: Step, hardware: Hardware) -> F64:
    """Return (blocks,) seconds of the host's update of each block, with all host cores."""
    columns = columns_of(step.parameters)
    of_blocks = (columns.block >= 0) & (columns.gradient >= 0)
    found: F64 = (
        np.bincount(columns.block[of_blocks], native_update_bytes(step)[of_blocks], len(step.blocks))
        / hardware.host_adam_bytes_per_s
    )
    return found
