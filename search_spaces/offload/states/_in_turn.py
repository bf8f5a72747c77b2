"""What techniques share whose stages are on several ranks, which take them in turn (`runtime.stages_in_turn`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from memtune.block_outputs import outputs_in
from memtune.edit import accumulate_gradients
from memtune.hardware import Hardware
from memtune.op_costs import op_costs
from memtune.packs import OnRanks
from memtune.passes.host_optimizer import Native, optimizer_on_host
from memtune.passes.layer_major import Where, parts_of
from memtune.passes.stages import Chain, chain_of
from memtune.passes.stages_in_turn import in_turn
from memtune.pipeline_order import idle_share
from memtune.planners.fastest_on_ranks import Partitions
from memtune.planners.stages_on_ranks import F64, TurnBytes, TurnCosts, cross_mapping
from memtune.program import Program, RankClass, Resource, Step
from memtune.remembered import remembered
from memtune.runtime.context import Context
from memtune.search_spaces.offload.states._packs import (
    block_bytes,
    from_plan,
    late_in,
    not_in_packs,
    require_packs_alone,
    within_budget,
)
from memtune.technique import Plan, Reason, Target
from memtune.units import format_bytes


def not_in_turn(program: Program, target: Target, count: int | None) -> Reason | None:
    """Why the blocks of `program` cannot be put into stages, `count` or any number, that the ranks take in turn."""
    if (reason := not_in_packs(program, target, alone=False)) is not None:
        return reason
    if count is not None and count % target.ranks:
        return Reason(f"{count} stages are no multiple of {target.ranks} ranks", "a multiple of the ranks")
    step, least = program.step, count or target.ranks
    if len(step.blocks) < least:
        return Reason(f"{len(step.blocks)} blocks are fewer than {least} stages", "fewer ranks")
    chain = chain_of(step)
    if isinstance(chain, str):
        return Reason(f"the blocks are no chain: {chain}", "offload: {states: {kind: optimizer_cpu}}")
    if len(chain.cuts) < least - 1:
        return Reason(f"the blocks can be cut in {len(chain.cuts)} places for {least} stages: {chain.obstacle}", "fewer ranks")
    return None


def partitions(program: Program, hardware: Hardware, *, prefetch: bool, crossed: bool, boundaries: Where = "host") -> Partitions:
    """All partitions of the blocks into stages on the ranks of `program`."""
    sizes, ranks, chain = block_bytes(program.step), program.ranks, chain_in(program)
    count = program.accumulate * ranks
    per_root = hardware.gpus_per_pcie_root if crossed else 1
    return Partitions(
        costs_of(program.step, hardware), TurnBytes(sizes.weights, sizes.gradients, sizes.saved), chain.cuts, count,
        lambda stages: cross_mapping(stages, ranks, per_root), prefetch, count * chain.passed_bytes * (boundaries == "device"),
    )  # fmt: skip


def chain_in(program: Program) -> Chain:
    """How the blocks of `program`, which `not_in_turn` has let through, hang together."""
    chain = chain_of(program.step)
    assert isinstance(chain, Chain), "fits refuses others"
    return chain


@remembered
def costs_of(step: Step, hardware: Hardware) -> TurnCosts:
    """What each block takes in one micro-batch."""
    sizes, seconds, parts = block_bytes(step), op_costs(step, hardware).op_s, parts_of(step)
    forward, backward = ([float(np.sum(seconds[rows])) for rows in blocks] for blocks in (parts.forward, parts.backward))
    chain = chain_of(step)
    assert isinstance(chain, Chain), "fits refuses others"
    up, down = hardware.host_to_device_bytes_per_s, hardware.device_to_host_bytes_per_s
    load = [n_bytes / up for n_bytes in sizes.weights]
    return TurnCosts(forward, backward, load, chain.passed_bytes / down + chain.passed_bytes / up)


@remembered
def on_ranks(program: Program, layout: OnRanks, hardware: Hardware, boundaries: Where = "host") -> Program:
    """The step of each rank, all micro-batches of all ranks in it; the fullest one first."""
    ranks, count = program.ranks, program.accumulate * program.ranks
    steps = _rank_steps(program, layout, hardware, boundaries)
    classes = [RankClass(1, each, (rank,)) for rank, each in enumerate(steps)]
    classes.sort(key=lambda each: each.step.peak_bytes(), reverse=True)
    idle = idle_share(ranks, len(layout.stages) // ranks, count)
    return Program(tuple(classes), program.micro_batch, 1, program.notes, sharers=ranks, unrolled=count, idle=idle)


@remembered
def _rank_steps(program: Program, layout: OnRanks, hardware: Hardware, boundaries: Where) -> tuple[Step, ...]:
    """By rank."""
    step = program.step if program.accumulate > 1 else accumulate_gradients(program.step)
    ranks, count = program.ranks, program.accumulate * program.ranks
    link = Resource.INTER_LINK if hardware.local_ranks(ranks) == 1 else Resource.INTRA_LINK
    return tuple(optimizer_on_host(each, Native()) for each in in_turn(step, layout, count, link, boundaries))


def within(
    program: Program,
    hardware: Hardware,
    budget_bytes: int | None,
    boundaries: Where,
    solve: Callable[[F64], OnRanks | None],
    all_of_them: Partitions,
) -> OnRanks | None:
    """What `solve` finds, under which every rank stays within the budget, as the pass says; None where nothing does."""
    if budget_bytes is None:
        return solve(np.full(program.ranks, np.inf))

    def peaks(layout: OnRanks) -> F64:
        return np.array([float(each.peak_bytes()) for each in _rank_steps(program, layout, hardware, boundaries)])

    return within_budget(solve, all_of_them.needed, peaks, budget_bytes, program.ranks)


def decisions_of(program: Program, layout: OnRanks) -> dict[str, Any]:
    """A plan that names `layout`, and what it moves."""
    chain, sizes = chain_in(program), block_bytes(program.step)
    outputs = {"outputs": list(chain.outputs)} if chain.outputs else {}
    return outputs | {
        "spans": [list(span) for span in layout.stages], "ranks": list(layout.ranks), "first": list(chain.first),
        "last": list(chain.last), "moved_bytes": moved_bytes(layout, sizes.weights, sizes.gradients),
    }  # fmt: skip


def moved_bytes(layout: OnRanks, weights: Sequence[int], gradients: Sequence[int]) -> int:
    """Of weights in and gradients out in one step, over all ranks.

    2|W| + |gradients|, less the last stage of each rank, which stays between its forward and its backward.
    """
    stay = [layout.mine(rank)[-1] for rank in set(layout.ranks)]
    return 2 * sum(weights) + sum(gradients) - sum(sum(weights[slice(*layout.stages[stage])]) for stage in stay)


def layout_of(plan: Plan, kind: str, *, prefetch: bool) -> OnRanks:
    """The layout that `plan` names.

    Raises:
        ApplyError: There is none, or it is damaged.
    """

    def read(decisions: Mapping[str, Any]) -> OnRanks:
        spans = tuple((int(first), int(end)) for first, end in decisions["spans"])
        return OnRanks(spans, tuple(int(rank) for rank in decisions["ranks"]), prefetch, late_in(decisions))

    return from_plan(plan, kind, "stages for several ranks", read)


def told_on_ranks(plan: Plan) -> tuple[str, ...]:
    """How many stages are where, and what they move; nothing for a damaged plan."""
    ranks, moved = plan.decisions.get("ranks"), plan.decisions.get("moved_bytes")
    if not isinstance(ranks, list) or not ranks or not isinstance(moved, int):
        return ()
    places = ", ".join(map(str, ranks[: len(set(ranks))]))
    return (
        f"{len(ranks)} stages, in turn on ranks {places}, over all micro-batches of all ranks",
        f"{format_bytes(moved)} of weights and gradients moved per step, over all ranks",
    )


def apply_in_turn(context: Context, plan: Plan, kind: str, *, prefetch: bool, boundaries: Where = "host") -> None:
    """Leave each rank its stages, on its host, and have `Tuned.step` run them.

    Raises:
        ApplyError: There is no plan for this model and these ranks, or what `runtime.stages_in_turn` raises.
    """
    require_packs_alone(context, kind)
    from memtune.runtime.stages_in_turn import stages_in_turn  # torch's pipelines take a second and a half to import

    layout = layout_of(plan, kind, prefetch=prefetch)
    first, last = (plan.decisions.get(name, []) for name in ("first", "last"))
    outputs = from_plan(plan, kind, "outputs of blocks", lambda told: outputs_in(told.get("outputs"), layout.stages[-1][1]))
    stages_in_turn(context, layout, frozenset(map(str, first)), frozenset(map(str, last)), kind, boundaries, outputs)
