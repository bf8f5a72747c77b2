"""Plans that say for each block what its second run keeps and what goes to the host: as data, as a pass, on the live model."""

from __future__ import annotations

from typing import Any, NamedTuple

from memtune.calls import Calls, by_name, from_names
from memtune.passes.move import move_activations
from memtune.passes.recompute import recompute_blocks
from memtune.program import Program
from memtune.remembered import remembered
from memtune.runtime import offload_dir
from memtune.runtime.come_ahead import Ahead
from memtune.runtime.context import Context
from memtune.runtime.shelf import Shelf
from memtune.search_spaces.recompute._calls import no_plan
from memtune.search_spaces.recompute._levels import Option, move_claims
from memtune.technique import Plan

_FIX = "memtune search  or  memtune trial --config  makes one and says the least budget; or recompute: {kind: selective}"


def entry_of(option: Option) -> dict[str, Any]:
    """What a plan says of an option, so that `options_in` finds it again."""
    calls = None if option.calls is None else option.calls.to_plain()
    return {"calls": calls, "moved": by_name(option.moved), "again": dict(option.again)}


def options_in(plan: Plan, blocks: int) -> list[Option]:
    """The option of each of `blocks` blocks.

    Raises:
        ApplyError: The plan is missing, malformed, or for another number of blocks.
    """
    try:
        entries = [
            Option(None if each["calls"] is None else Calls.from_plain(each["calls"]), from_names(each["moved"]))
            for each in plan.decisions["options"]
        ]
        found = [entries[i] for i in plan.decisions["blocks"]]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise no_plan("the config has none, or it is damaged", _FIX) from error
    if len(found) != blocks:
        raise no_plan(f"the config's is for {len(found)} blocks, the model has {blocks}", _FIX)
    return found


class Spilled(NamedTuple):
    """Blocks whose moved tensors go on from the host to SSD, and how many of them are read before backward asks."""

    blocks: frozenset[int] = frozenset()
    ahead: int = 0


def spilled_in(plan: Plan) -> Spilled:
    """What `plan` says of SSD; nothing where it does not.

    Raises:
        ApplyError: What it says is malformed.
    """
    try:
        return Spilled(frozenset(int(each) for each in plan.decisions.get("on_ssd", [])), int(plan.decisions.get("ahead", 0)))
    except (TypeError, ValueError) as error:
        raise no_plan("the config has none, or it is damaged", _FIX) from error


def window_in(plan: Plan) -> int:
    """Tensors that `plan` has on their way at once; 0 where it does not say.

    Raises:
        ApplyError: What it says is malformed.
    """
    try:
        return max(int(plan.decisions.get("window", 0)), 0)
    except (TypeError, ValueError) as error:
        raise no_plan("the config has none, or it is damaged", _FIX) from error


def as_planned(program: Program, plan: Plan) -> Program:
    """Every block runs again in backward and gives to the host as far as `plan` says."""
    return _with_options(program, tuple(options_in(plan, len(program.step.blocks))), spilled_in(plan), window_in(plan))


@remembered
def _with_options(program: Program, options: tuple[Option, ...], spilled: Spilled, window: int) -> Program:
    """One program for all plans of the same options: plans for other later techniques often are."""
    again = [index for index, option in enumerate(options) if option.calls is not None]
    step = recompute_blocks(program.step, again, [option.calls or Calls() for option in options]) if again else program.step
    claims = move_claims(list(options), spilled.blocks)
    return program.with_step(move_activations(step, claims, spilled.ahead if spilled.blocks else None, window=window))


def claim_planned(context: Context, plan: Plan) -> None:
    """The same claimed in the activation table."""
    table, spilled = context.activations, spilled_in(plan)
    if spilled.blocks:
        offload_dir.checked()
        table.shelf = Shelf(spilled.ahead)
        context.checks["recompute"] = lambda: {"ssd_written_bytes": table.shelf.written_bytes}
    if window := window_in(plan):
        table.ahead, table.out_at_once = Ahead(window), window
    for region, option in zip(table.regions, options_in(plan, len(table.regions)), strict=True):
        if option.calls is not None:
            table.claim_recompute(region.index, option.calls if option.calls != Calls() else None)
        if option.moved:
            table.claim_move(region.index, 1.0, 0, option.moved, ssd=region.index in spilled.blocks)
