"""Stages over all micro-batches, the next one coming in while one computes (Mobius, Feng et al. 2023)."""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune.effects import Effects
from memtune.hardware import Hardware, op_costs
from memtune.offload.layer_major import OnRanks, Packs, Span, parts_of, spans
from memtune.offload.multiplexed import StageCosts, fastest_stages, memory_bytes
from memtune.program import F64, Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common import (
    EAGER_ONLY,
    PacksPlan,
    StagesPlan,
    apply_in_turn,
    apply_packs,
    backward_packs,
    block_bytes,
    costs_of,
    fields_of,
    for_other_ranks,
    in_packs,
    late_in_stages,
    no_such_block,
    not_in_packs,
    not_in_turn,
    on_ranks,
    partitions,
    within,
    within_budget,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_bytes


class MobiusPlan(PacksPlan):
    """Stages of one rank, and what they move; the packs of backward are the stages."""

    stages: Annotated[int, Field(ge=1)]
    """Number of stages."""
    moved_bytes: Annotated[int, Field(ge=0)]
    """Bytes of weights reloaded and gradients offloaded per step."""
    late: tuple[Annotated[int, Field(ge=0)], ...]
    """Blocks whose updates go on beside the next step's forward, ascending."""

    def packs(self, **settings: Any) -> Packs:
        """Return the stages, with the blocks that are updated late."""
        return super().packs(late=self.late, **settings)


class MobiusStagesPlan(StagesPlan):
    """Stages that several ranks take in turn."""

    stages: Annotated[int, Field(ge=1)]
    """Number of stages, of all ranks together."""
    late: tuple[Annotated[int, Field(ge=0)], ...]
    """Blocks whose updates go on beside the next step's forward, ascending."""

    def layout(self, **settings: Any) -> OnRanks:
        """Return the stages on their ranks, with the blocks that are updated late."""
        return super().layout(late=self.late, **settings)


class Mobius(Technique):
    """Trades one more forward for the blocks' weights, gradients and state, and hides the weights' way behind
    compute.

    Blocks are joined to stages, more than there are devices, which take them in turn. All micro-batches of a
    stage run before the next one; meanwhile the next one's weights come in, forward and back, so two stages'
    weights are on the device. What stages start from waits on the host. Backward runs a stage forward again;
    its gradients leave once and the host updates it at once. Updates that the host does not come to in
    backward go on beside the next step's forward, each over before its weights come in; the planner chooses
    which ones. A step moves the weights twice, but for the last stage's, which stay between forward and
    backward, and the gradients once: 2|W| - |W of the last stage| + |gradients|. The planner finds the
    partition of smallest step time under which a stage, what comes in, its gradients and its activations stay
    within the budget; it is exact.

    On g ranks stage j is on the rank of place j mod g, each rank holds its stages alone, and ranks bring
    their own micro-batches and work on all of them; what passes between stages goes by way of the hosts. The
    last stage of each rank stays between its forward and its backward. Cross mapping places ranks so that
    stages in turn are under different root complexes. The partition is then the fastest one into a multiple
    of g stages under which each rank stays within the budget: of all of them where they are few, else the
    best that is found from even ones (`offload.multiplexed.stage_partition_planner`). Forward and backward
    have the same stages: a block's weights are on one rank's host. Such a config is written by hand, with
    `sharding: {states: {kind: none}}`.

    Distinguishing test: weights of every stage but the first come in while another computes, the partition is
    the fastest of all (brute force), no mapping has less contention, and late updates are under way when the
    step returns.
    """

    kind: Literal["mobius"] = "mobius"
    slot: ClassVar[str] = "offload.states"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (MobiusPlan, MobiusStagesPlan)
    title: ClassVar[str] = "Stages in turn, the next one prefetched"
    source: ClassVar[str] = (
        "Feng et al. 2023, Mobius: Fine Tuning Large-Scale Models on Commodity GPU Servers, ASPLOS 23"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(
        averages="all",
        calls="block_hooks",
        packs=backward_packs,
        moves="block",
        eager_only=EAGER_ONLY,
        host_share=1.0,
    )

    stages: Annotated[int, Field(ge=1)] | None = None
    """Number of stages, on several ranks a multiple of them; none given: solved for, there with `--axes
    sharding.parallel`.
    """
    mapping: Literal["cross", "in_order"] = "cross"
    """Of stages to ranks: away from the root complex of their neighbours, or rank by rank."""
    late: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Blocks whose updates go on beside the next step's forward; none given: solved for; []: all end within
    the step.
    """

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks that are a chain without random numbers and statistics, in float32, and enough of
        them.
        """
        if (reason := no_such_block(self.late, program)) is not None:
            return reason
        if target.ranks > 1:
            if self.stages is None and target.cut is None:
                return Reason(
                    "stages on several ranks are solved for when somebody asks",
                    "stages: a multiple of the ranks, or --axes sharding.parallel,offload.states",
                )
            return not_in_turn(self, program, target, self.stages)
        if (reason := not_in_packs(self, program, target)) is not None:
            return reason
        if self.stages is not None and self.stages > len(program.step.blocks):
            return Reason(
                f"the model has {len(program.step.blocks)} blocks only",
                "fewer stages, or none to have them solved",
            )
        return None

    def plan(self, program: Program, target: Target) -> MobiusPlan | MobiusStagesPlan:
        """Which blocks are in which stage, where, and which are updated late."""
        hardware, late = target.hardware, self.late
        if program.ranks > 1:
            layout = _on_ranks(program, hardware, target.budget_bytes, self.stages, self.mapping == "cross")
            late = _late_on_ranks(program, hardware, layout) if late is None else late
            return MobiusStagesPlan(
                **fields_of(program, layout), stages=len(layout.stages), late=tuple(sorted(late))
            )
        packs = _solved(program, hardware, target.budget_bytes, self.stages)
        late = _late(program, hardware, packs) if late is None else late
        return MobiusPlan(
            forward=packs.forward,
            backward=packs.backward,
            stages=len(packs.backward),
            moved_bytes=_moved(program, packs),
            late=tuple(sorted(late)),
        )

    def rewrite(self, program: Program, plan: MobiusPlan | MobiusStagesPlan, target: Target) -> Program:
        """All micro-batches, stage by stage."""
        if isinstance(plan, MobiusStagesPlan):
            return on_ranks(program, plan.layout(prefetch=True), target.hardware)
        return in_packs(program, plan.packs(prefetch=True), "host")

    def apply(self, context: Context, plan: MobiusPlan | MobiusStagesPlan) -> None:
        """Weights and optimizer to the host; `Tuned.step` runs stages."""
        if context.placement.world_size > 1:
            apply_in_turn(context, plan, self.kind, prefetch=True)
            return
        if isinstance(plan, MobiusStagesPlan):
            raise for_other_ranks(context, self.kind)
        apply_packs(context, plan.packs(prefetch=True), "host", self.kind)

    def explain(self, plan: MobiusPlan | MobiusStagesPlan) -> tuple[str, ...]:
        """How many stages there are, what they move, and how many blocks are updated late."""
        rest = (f"{len(plan.late)} blocks updated beside the next step's forward",) if plan.late else ()
        if isinstance(plan, MobiusStagesPlan):
            return plan.explain() + rest
        moved = f"{format_bytes(plan.moved_bytes)} of weights and gradients moved per step"
        return (f"{plan.stages} stages over all micro-batches, {moved}", *rest)

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of parameters and optimizer, when stages are updated, and how many there are."""
        settings: dict[str, Any] = {"stages": self.stages or "solved", "boundaries": "host", "prefetch": True}
        settings |= {"mapping": self.mapping} if target.ranks > 1 else {}
        settings |= {"late": "solved" if self.late is None else list(self.late)}
        return {
            "states.offload": {
                "parameters": "host",
                "optimizer": "host",
                "trigger": "in_backward",
                "packs": settings,
            }
        }


@functools.lru_cache(maxsize=64)
def _late(program: Program, hardware: Hardware, packs: Packs) -> tuple[int, ...]:
    """The blocks whose updates one host does not come to in backward."""
    costs = _costs(program, hardware)
    return late_in_stages(program, hardware, packs.backward, costs.forward_s, costs.backward_s)


@functools.lru_cache(maxsize=32)
def _late_on_ranks(program: Program, hardware: Hardware, layout: OnRanks) -> tuple[int, ...]:
    """The same of each rank, which all use one host; neighbours compute meanwhile, so a stage takes as long
    as its compute.
    """
    costs, count = costs_of(program.step, hardware), program.accumulate * program.ranks
    forward, backward = ([count * each for each in column] for column in (costs.forward_s, costs.backward_s))
    found = [
        late_in_stages(
            program, hardware, [layout.stages[stage] for stage in layout.mine(rank)], forward, backward
        )
        for rank in range(program.ranks)
    ]
    return tuple(sorted(block for each in found for block in each))


def _moved(program: Program, packs: Packs) -> int:
    """Bytes of weights in and gradients out in one step."""
    weights, gradients = block_bytes(program.step)[:2]
    return 2 * sum(weights) - sum(weights[slice(*packs.turn)]) + sum(gradients)


@functools.lru_cache(maxsize=64)
def _solved(program: Program, hardware: Hardware, budget_bytes: int | None, count: int | None) -> Packs:
    """The fastest stages that the budget holds, as the pass confirms; else single blocks, which need
    least.
    """
    costs, beside = _costs(program, hardware), block_bytes(program.step).beside
    smallest = spans([1] * len(costs.weights))
    if budget_bytes is None:
        return _in_turn(fastest_stages(costs, count=count) or smallest)

    def solve(room: F64) -> tuple[Span, ...] | None:
        return fastest_stages(costs, min(float(room[0]), budget_bytes - beside), count)

    def needed(stages: tuple[Span, ...]) -> F64:
        return np.array([float(memory_bytes(costs, stages))])

    def peaks(stages: tuple[Span, ...]) -> F64:
        return np.array([float(in_packs(program, _in_turn(stages), "host").step.peak_bytes())])

    found = within_budget(solve, needed, peaks, budget_bytes)
    return _in_turn(
        found or (smallest if count is None else fastest_stages(costs, math.inf, count) or smallest)
    )


@functools.lru_cache(maxsize=32)
def _on_ranks(
    program: Program, hardware: Hardware, budget_bytes: int | None, count: int | None, crossed: bool
) -> OnRanks:
    """The fastest partition that fits; where none does, that into most stages which needs least."""
    counts = [count] if count else list(range(program.ranks, len(program.step.blocks) + 1, program.ranks))
    each = partitions(program, hardware, prefetch=True, crossed=crossed)
    found = within(program, hardware, budget_bytes, "host", lambda room: each.fastest(counts, room), each)
    return found or each.smallest(counts)


def _in_turn(stages: tuple[Span, ...]) -> Packs:
    return Packs(stages[:-1], stages, prefetch=True)


@functools.lru_cache(maxsize=32)
def _costs(program: Program, hardware: Hardware) -> StageCosts:
    """What each block takes and needs, over all micro-batches of a step."""
    step, sizes = program.step, block_bytes(program.step)
    seconds, parts = op_costs(step, hardware).op_s, parts_of(step)
    forward, backward = (
        [program.accumulate * float(np.sum(seconds[rows])) for rows in blocks]
        for blocks in (parts.forward, parts.backward)
    )
    load = [n_bytes / hardware.host_to_device_bytes_per_s for n_bytes in sizes.weights]
    return StageCosts(forward, backward, load, sizes.weights, sizes.gradients, sizes.saved)
