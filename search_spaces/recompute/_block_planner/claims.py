"""Plans that list for each block what its second run keeps and what is offloaded: data, pass and runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Annotated, Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from memtune import refusals
from memtune.activations.offload import Prefetcher, SSDSpill, move_activations
from memtune.activations.recompute import recompute_blocks
from memtune.program import OFFLOAD, SPILL, OpAddresses, Program, by_name, memoized
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes, CallSetField, CallsField, Index, require_entries
from memtune.search_spaces.recompute._block_planner.measured_options import Option, offload_claims
from memtune.ssd import offload_dir
from memtune.technique import Plan
from memtune.units import format_bytes, format_seconds


class OptionEntry(BaseModel):
    """Calls that a block keeps, recomputes and offloads."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    calls: CallsField | None
    """Calls that do not run again; None if nothing runs again."""
    offloaded: CallSetField
    """Calls whose saved outputs are offloaded."""
    recomputed: dict[str, Annotated[int, Field(ge=0)]]
    """Op → number of calls that run again, for `explain`."""


class OptionsPlan(Plan):
    """Calls that each block keeps, recomputes and offloads."""

    options: tuple[OptionEntry, ...]
    """The different options."""
    blocks: tuple[Index, ...]
    """(blocks,) entry of `options` of each block."""

    @model_validator(mode="after")
    def _has_entries(self) -> Self:
        require_entries("options", self.options, self.blocks)
        return self


def option_fields(option: Option) -> dict[str, Any]:
    """Return the fields of an `OptionEntry` for `option`."""
    return {"calls": option.calls, "offloaded": option.moved, "recomputed": dict(option.again)}


def options_by_block(plan: OptionsPlan, blocks: int) -> list[Option]:
    """Return the option of each of `blocks` blocks.

    Raises:
        ApplyError: The plan is for another number of blocks.
    """
    refusals.require_blocks(len(plan.blocks), blocks, "recompute", "recompute: {kind: selective}")
    entries = [Option(each.calls, each.offloaded) for each in plan.options]
    return [entries[i] for i in plan.blocks]


class SpillSpec(NamedTuple):
    """Blocks whose offloaded tensors go on from host to SSD, and the number prefetched from there."""

    blocks: frozenset[int] = frozenset()
    prefetch: int = 0


_NOTHING = SpillSpec()


def rewrite_planned(
    program: Program, plan: OptionsPlan, spilled: SpillSpec = _NOTHING, window: int = 0
) -> Program:
    """Return `program` recomputed and offloaded as `plan` says, `window` tensors in flight at once."""
    return _with_options(program, tuple(options_by_block(plan, len(program.step.blocks))), spilled, window)


@memoized
def _with_options(program: Program, options: tuple[Option, ...], spilled: SpillSpec, window: int) -> Program:
    """Return the rewritten program, cached: plans often share options."""
    again = [index for index, option in enumerate(options) if option.calls is not None]
    step = (
        recompute_blocks(program.step, again, [option.calls or OpAddresses() for option in options])
        if again
        else program.step
    )
    claims = offload_claims(list(options), spilled.blocks)
    return program.with_step(move_activations(step, claims, spilled.prefetch, window=window))


def claim_planned(
    context: Context, plan: OptionsPlan, spilled: SpillSpec = _NOTHING, window: int = 0
) -> None:
    """Claim in the activation table what `plan` recomputes and offloads."""
    table = context.activations
    if spilled.blocks:
        offload_dir.checked()
        table.ssd_spill = SSDSpill(spilled.prefetch)
        context.checks["recompute"] = lambda: {"ssd_written_bytes": table.ssd_spill.written_bytes}
    if window:
        table.prefetcher, table.out_at_once = Prefetcher(window), window
    options = options_by_block(plan, len(context.all_blocks))
    policies = [SPILL if block in spilled.blocks else OFFLOAD for block in range(len(options))]
    own = context.of_own_blocks(list(zip(options, policies, strict=True)))
    for region, (option, policy) in zip(table.regions, own, strict=True):
        if option.calls is not None:
            table.claim_recompute(region.index, option.calls if option.calls != OpAddresses() else None)
        if option.moved:
            table.claim_move(region.index, 1.0, 0, option.moved, policy)


class PricedEntry(OptionEntry):
    """An option with the bytes that it frees and the time that it costs in its block."""

    held_bytes: Bytes
    """Bytes that the block holds between its forward and its backward."""
    plain_bytes: Bytes
    """Bytes that it holds without recompute and offload."""
    seconds: float
    """Seconds that it adds to a micro-batch."""


class PlannedPlan(OptionsPlan):
    """Calls that each block keeps, recomputes and offloads, with the resulting peak."""

    options: tuple[PricedEntry, ...]
    """The different options."""
    budget_bytes: Bytes
    """Largest peak allowed."""
    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    smallest_bytes: Bytes
    """Smallest peak of any plan by blocks."""
    plain_bytes: Bytes
    """Peak without recompute and offload."""


def explain_planned(plan: PlannedPlan) -> Iterator[str]:
    """Yield the peak and the budget, then one line for each run of blocks with the same option."""
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
    """Return one option of a block as a clause."""
    parts = []
    if option.recomputed:
        parts.append(f"recomputes {_names(option.recomputed)}")
    elif option.calls is not None:
        parts.append("runs again")
    if option.offloaded:
        offloaded = {name: len(calls) for name, calls in by_name(option.offloaded).items()}
        parts.append(f"offloads {_names(offloaded)}")
    if not parts:
        return f"keeps everything, {each}{format_bytes(option.held_bytes)}"
    kept = f"{each}keeps {format_bytes(option.held_bytes)} of {format_bytes(option.plain_bytes)}"
    kept += f" for {format_seconds(option.seconds)}"
    return f"{kept}: {', '.join(parts)}"


def _names(counts: Mapping[str, int]) -> str:
    """Return the ops as text, such as `native_layer_norm ×2, gelu`."""
    short: dict[str, int] = {}
    for name, count in counts.items():
        key = name.split(".")[1] if "." in name else name
        short[key] = short.get(key, 0) + count
    return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in short.items())
