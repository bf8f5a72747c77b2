"""What techniques share whose stages are on several ranks, which take them in turn (`runtime.stages_in_turn`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from memtune.edit import accumulate_gradients
from memtune.errors import ApplyError
from memtune.hardware import Hardware
from memtune.op_costs import op_costs
from memtune.packs import OnRanks, Span
from memtune.passes.host_optimizer import Native, optimizer_on_host
from memtune.passes.layer_major import parts_of
from memtune.passes.stages import Chain, chain_of
from memtune.passes.stages_in_turn import in_turn
from memtune.pipeline_order import idle_share
from memtune.planners.stages import balanced
from memtune.planners.stages_on_ranks import TurnCosts, cross_mapping
from memtune.program import Program, RankClass, Resource, Step
from memtune.remembered import remembered
from memtune.runtime.context import Context
from memtune.search_spaces.offload.states._packs import block_bytes, first_within, not_in_packs
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


def divided(program: Program, hardware: Hardware, count: int, *, prefetch: bool, crossed: bool) -> OnRanks | None:
    """The blocks in `count` stages, the slowest as fast as can be, then the fullest as empty; None where cuts are too few."""
    step, sizes = program.step, block_bytes(program.step)
    chain = chain_of(step)
    assert isinstance(chain, Chain), "fits refuses others"
    costs = costs_of(step, hardware)
    need = np.add(sizes.weights, np.add(sizes.gradients, sizes.saved)).astype(np.float64)
    seconds = np.add(costs.forward_s, costs.backward_s)
    starts = balanced(seconds, np.broadcast_to(need, (count, len(need))), chain.cuts, count)
    if starts is None:
        return None
    spans: tuple[Span, ...] = tuple(zip(starts, (*starts[1:], len(step.blocks)), strict=True))
    per_root = hardware.gpus_per_pcie_root if crossed else 1
    return OnRanks(spans, cross_mapping(count, program.ranks, per_root), prefetch)


@functools.lru_cache(maxsize=32)
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
def on_ranks(program: Program, layout: OnRanks, hardware: Hardware) -> Program:
    """The step of each rank, all micro-batches of all ranks in it; the fullest one first."""
    step = program.step if program.accumulate > 1 else accumulate_gradients(program.step)
    ranks, count = program.ranks, program.accumulate * program.ranks
    link = Resource.INTER_LINK if hardware.local_ranks(ranks) == 1 else Resource.INTRA_LINK
    steps = [optimizer_on_host(each, Native()) for each in in_turn(step, layout, count, link)]
    classes = sorted((RankClass(1, each) for each in steps), key=lambda each: each.step.peak_bytes(), reverse=True)
    idle = idle_share(ranks, len(layout.stages) // ranks, count)
    return Program(tuple(classes), program.micro_batch, 1, program.notes, sharers=ranks, unrolled=count, idle=idle)


def first_that_fits(
    program: Program, layouts: Sequence[OnRanks], least: OnRanks, hardware: Hardware, budget_bytes: int | None
) -> OnRanks:
    """The first of `layouts` under which every rank stays within the budget, as the pass says; else `least`."""
    if budget_bytes is None:
        return layouts[0]
    return first_within(layouts, lambda each: on_ranks(program, each, hardware).step.peak_bytes(), budget_bytes) or least


def decisions_of(program: Program, layout: OnRanks) -> dict[str, Any]:
    """A plan that names `layout`, and what it moves."""
    chain, sizes = chain_of(program.step), block_bytes(program.step)
    assert isinstance(chain, Chain), "fits refuses others"
    return {
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
    try:
        spans = tuple((int(first), int(end)) for first, end in plan.decisions["spans"])
        return OnRanks(spans, tuple(int(rank) for rank in plan.decisions["ranks"]), prefetch)
    except (KeyError, TypeError, ValueError) as error:
        raise ApplyError(
            f"offload.states: {{kind: {kind}}} has no stages for several ranks.",
            evidence=f"The plan says {plan.decisions or 'nothing'}: {error}.",
            fix="memtune search, which writes them with the config; memtune trial finds them for itself", code="MT364",
        ) from None  # fmt: skip


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


def apply_in_turn(context: Context, plan: Plan, kind: str, *, prefetch: bool) -> None:
    """Leave each rank its stages, on its host, and have `Tuned.step` run them.

    Raises:
        ApplyError: There is no plan for this model and these ranks, or what `runtime.stages_in_turn` raises.
    """
    from memtune.runtime.stages_in_turn import stages_in_turn  # torch's pipelines take a second and a half to import

    layout = layout_of(plan, kind, prefetch=prefetch)
    first, last = (plan.decisions.get(name, []) for name in ("first", "last"))
    stages_in_turn(context, layout, frozenset(map(str, first)), frozenset(map(str, last)), kind)
