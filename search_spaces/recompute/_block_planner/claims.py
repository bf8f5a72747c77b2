"""Plans that say for each block what its second run keeps and what goes to the host: as data, as a pass, on
the live model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memtune.activations.offload import Prefetcher, SSDSpill, move_activations
from memtune.activations.recompute import recompute_blocks
from memtune.program import OpAddresses, Program, by_name, remembered
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes, CallSetField, CallsField, Index, require_entries
from memtune.search_spaces.recompute._block_planner.call_selection import no_plan
from memtune.search_spaces.recompute._block_planner.measured_options import Option, move_claims
from memtune.ssd import offload_dir
from memtune.technique import Plan
from memtune.units import format_bytes, format_seconds

_FIX = (
    "memtune search  or  memtune trial --config  makes one and says the least budget; or recompute: {kind:"
    " selective}"
)


class OptionEntry(BaseModel):
    """What a block does: keep, run again, offload."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    calls: CallsField | None
    """Calls that do not run again; none where nothing does."""
    moved: CallSetField
    """Calls whose saved outputs are offloaded."""
    again: dict[str, Annotated[int, Field(ge=0)]]
    """Op → how often it runs again, for `explain`."""


class OptionsPlan(Plan):
    """What each block keeps, runs again and offloads."""

    options: tuple[OptionEntry, ...]
    """The different options."""
    blocks: tuple[Index, ...]
    """(blocks,) entry of `options` that each block has."""

    @model_validator(mode="after")
    def _has_entries(self) -> Self:
        require_entries("options", self.options, self.blocks)
        return self


def fields_of(option: Option) -> dict[str, Any]:
    """Return the fields of an `OptionEntry` for `option`."""
    return {"calls": option.calls, "moved": option.moved, "again": dict(option.again)}


def options_in(plan: OptionsPlan, blocks: int) -> list[Option]:
    """Return the option of each of `blocks` blocks.

    Raises:
        ApplyError: The plan is for another number of blocks.
    """
    if len(plan.blocks) != blocks:
        raise no_plan(f"the config's is for {len(plan.blocks)} blocks, the model has {blocks}", _FIX)
    entries = [Option(each.calls, each.moved) for each in plan.options]
    return [entries[i] for i in plan.blocks]


class Spilled(NamedTuple):
    """Blocks whose moved tensors go on from the host to SSD, and how many of them are read before backward
    asks.
    """

    blocks: frozenset[int] = frozenset()
    ahead: int = 0


_NOTHING = Spilled()


def as_planned(program: Program, plan: OptionsPlan, spilled: Spilled = _NOTHING, window: int = 0) -> Program:
    """Every block runs again in backward and gives to the host as far as `plan` says, `window` tensors at
    once.
    """
    return _with_options(program, tuple(options_in(plan, len(program.step.blocks))), spilled, window)


@remembered
def _with_options(program: Program, options: tuple[Option, ...], spilled: Spilled, window: int) -> Program:
    """One program for all plans of the same options: plans for other later techniques often are."""
    again = [index for index, option in enumerate(options) if option.calls is not None]
    step = (
        recompute_blocks(program.step, again, [option.calls or OpAddresses() for option in options])
        if again
        else program.step
    )
    claims = move_claims(list(options), spilled.blocks)
    return program.with_step(
        move_activations(step, claims, spilled.ahead if spilled.blocks else None, window=window)
    )


def claim_planned(context: Context, plan: OptionsPlan, spilled: Spilled = _NOTHING, window: int = 0) -> None:
    """The same claimed in the activation table."""
    table = context.activations
    if spilled.blocks:
        offload_dir.checked()
        table.shelf = SSDSpill(spilled.ahead)
        context.checks["recompute"] = lambda: {"ssd_written_bytes": table.shelf.written_bytes}
    if window:
        table.ahead, table.out_at_once = Prefetcher(window), window
    for region, option in zip(table.regions, options_in(plan, len(table.regions)), strict=True):
        if option.calls is not None:
            table.claim_recompute(region.index, option.calls if option.calls != OpAddresses() else None)
        if option.moved:
            table.claim_move(region.index, 1.0, 0, option.moved, ssd=region.index in spilled.blocks)


# A plan of `planned` in lines for people.
class PricedEntry(OptionEntry):
    """An option with what it frees and costs in its block."""

    held_bytes: Bytes
    """Bytes that the block keeps."""
    plain_bytes: Bytes
    """Bytes that it keeps where nothing runs again and nothing is offloaded."""
    seconds: float
    """Seconds that a micro-batch takes longer."""


class PlannedPlan(OptionsPlan):
    """What each block keeps, runs again and offloads, and what that comes to."""

    options: tuple[PricedEntry, ...]
    """The different options."""
    budget_bytes: Bytes
    """Peak to stay within."""
    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    smallest_bytes: Bytes
    """Smallest peak of any plan by blocks."""
    plain_bytes: Bytes
    """Peak where everything is kept."""


def explained(plan: PlannedPlan) -> Iterator[str]:
    """Yield the peak against the budget, then one line for each run of blocks that do the same."""
    peak, budget, plain = (
        format_bytes(each) for each in (plan.peak_bytes, plan.budget_bytes, plan.plain_bytes)
    )
    blocks = plan.blocks
    costs = format_seconds(sum(plan.options[i].seconds for i in blocks))
    yield (
        f"peak {peak} planned for a budget of {budget}; {plain} if everything were kept; costs {costs} a"
        " micro-batch"
    )
    for index, run in groupby(range(len(blocks)), key=lambda block: blocks[block]):
        members, option = list(run), plan.options[index]
        where = f"block {members[0]}" if len(members) == 1 else f"blocks {members[0]} to {members[-1]}"
        yield f"{where}: {_option(option, each='each ' if len(members) > 1 else '')}"


def _option(option: PricedEntry, each: str) -> str:
    parts = []
    if option.again:
        parts.append(f"runs {_names(option.again)} again")
    elif option.calls is not None:
        parts.append("runs again")
    if option.moved:
        moved = {name: len(calls) for name, calls in by_name(option.moved).items()}
        parts.append(f"moves {_names(moved)} to the host")
    if not parts:
        return f"keeps everything, {each}{format_bytes(option.held_bytes)}"
    kept = f"{each}keeps {format_bytes(option.held_bytes)} of {format_bytes(option.plain_bytes)}"
    kept += f" for {format_seconds(option.seconds)}"
    return f"{kept}: {', '.join(parts)}"


def _names(counts: Mapping[str, int]) -> str:
    """`native_layer_norm ×2, gelu`."""
    short: dict[str, int] = {}
    for name, count in counts.items():
        key = name.split(".")[1] if "." in name else name
        short[key] = short.get(key, 0) + count
    return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in short.items())
