"""TSPLIT's plans for a program and budget: the planner's choice, its effect on the Step, its true peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from memtune import refusals
from memtune.activations.offload import OffloadClaim, PlanResult, Problem, move_activations, solve
from memtune.activations.tiling import PositionWise, Tiling, split_regions, tile_regions
from memtune.program import I64, INPUTS, OpAddress, Program, RankClass, Step, memoized
from memtune.search_spaces._plan_fields import Bytes, CallSetField, Index, require_entries
from memtune.search_spaces.offload.activations._tsplit_options import (
    Decisions,
    TiledModule,
    calls_in_parts,
    decisions,
    tileable,
)
from memtune.search_spaces.recompute._block_planner.budget import apply_later_passes
from memtune.search_spaces.recompute._block_planner.measured_options import live_bytes, windows
from memtune.technique import Plan, Technique

if TYPE_CHECKING:
    from memtune.hardware import Hardware

_TRIES = 6
"""Number of plans that are rewritten to find one whose true peak is within the budget."""
_SURE = 1.02
"""Factor by which the planner's prices may exceed the peak of the passes."""


class TsplitOutcome(BaseModel):
    """Predicted bytes and time of a plan, for `explain`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    plain_bytes: Bytes
    """The same without this technique."""
    offloaded_bytes: Bytes
    """Bytes that are offloaded in a micro-batch."""
    added_s: float
    """Seconds that a micro-batch takes longer."""


class TsplitPlan(Plan):
    """Calls whose saved tensors are offloaded, and modules that run in parts."""

    offloaded: tuple[CallSetField, ...]
    """The different sets of calls whose saved outputs are offloaded."""
    blocks: tuple[Index, ...]
    """(blocks,) entry of `moved` for each block."""
    split: dict[str, Annotated[int, Field(ge=1, le=16)]]
    """Module → number of parts."""
    again: tuple[str, ...] = ()
    """Modules of `split` that save their input alone, and run again in backward."""
    by_sample: tuple[str, ...] = ()
    """Modules of `split` that run in parts of their samples; others in parts of their tokens."""
    prefetch: Annotated[int, Field(ge=0, le=16)]
    """Tensors that are prefetched."""
    predicted: TsplitOutcome | None = None
    """Predicted bytes and time; none if nothing was planned."""
    unsplit: str = ""
    """Reason why no module can run in parts although the settings allow it; "" if one can."""

    @model_validator(mode="after")
    def _has_entries(self) -> Self:
        require_entries("offloaded", self.offloaded, self.blocks)
        return self


@dataclass(frozen=True)
class TsplitLimits:
    """The planner's freedom: numbers of parts, smallest copy, prefetch, and recomputation of modules."""

    parts: tuple[int, ...]
    min_bytes: int
    prefetch: int
    again: bool


@dataclass(frozen=True, eq=False)
class TsplitSolution:
    """A plan, and the peak of the program under it."""

    plan: TsplitPlan
    peak_bytes: int
    """Peak of the whole program after every later pass."""
    plain_bytes: int
    budget_bytes: int
    is_floor: bool = False
    """Nothing was planned: the peak is a lower bound for every plan."""

    @property
    def is_within(self) -> bool:
        """Return whether the peak is within the budget."""
        return self.peak_bytes <= self.budget_bytes


@lru_cache(maxsize=64)
def solve_tsplit(
    step: Step,
    later: tuple[Technique, ...],
    hardware: Hardware,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    budget_bytes: int | None,
    share: float | None,
    limits: TsplitLimits,
) -> TsplitSolution:
    """Return the plan for a budget in bytes, or for a share of the way from the smallest peak to the plain
    one.
    """
    # The planner prices single moments; the passes decide. If the rewritten program exceeds the budget after
    # every later pass, the planner gets a budget smaller by the excess. If no plan with prefetch fits, plans
    # without prefetch, recomputation or parts are tried. The result is cached, since both `fits` and `plan`
    # ask for it.
    program = Program((RankClass(ranks, step),), micro_batch, accumulate)
    run = _Run(step, later, hardware, program, limits)
    plain = run.plain_bytes
    if budget_bytes is None:
        least = min(
            (each.solve_tsplit(0) for each in run.with_less()),
            key=lambda each: each.peak_bytes,
        )
        budget_bytes = least.peak_bytes + round((plain - least.peak_bytes) * (share or 0.0))
        if not share:
            return replace(least, budget_bytes=budget_bytes)
    if plain <= budget_bytes:
        return run.nothing(plain, budget_bytes)
    best = None
    for each in run.with_less():
        found = replace(_solve_within(each, budget_bytes), budget_bytes=budget_bytes)
        if best is None or found.peak_bytes < best.peak_bytes:
            best = found
        # Fewer actions, or the same at other times, free no more: no further run has a lower floor.
        if best.is_within or best.is_floor:
            break
    assert best is not None
    return best


def _solve_within(run: _Run, budget_bytes: int) -> TsplitSolution:
    """Return the first plan whose true peak is within the budget, or the one of smallest peak."""
    if run.floor_bytes > budget_bytes * _SURE:  # the planner would try every action before it gives up
        return replace(run.nothing(run.floor_bytes, budget_bytes), is_floor=True)
    aim, before = budget_bytes, run.plain_bytes
    for _ in range(_TRIES):
        found = run.solve_tsplit(aim)
        if (
            found.peak_bytes <= budget_bytes or found.peak_bytes == before
        ):  # no further action lowers the peak
            return found
        # Later passes add about the same to a plan nearby, so the excess is taken off the aim.
        aim, before = aim - (found.peak_bytes - budget_bytes), found.peak_bytes
    return run.solve_tsplit(0)


class _Run:
    """One step under one set of later techniques."""

    def __init__(
        self,
        step: Step,
        later: tuple[Technique, ...],
        hardware: Hardware,
        program: Program,
        limits: TsplitLimits,
    ) -> None:
        self.step = step
        self.hardware = hardware
        self._later = later
        self._program = program
        self._limits = limits
        self._after_plain = self._after(step)
        self.plain_bytes = int(live_bytes(self._after_plain, hardware).max(initial=0))

    def with_less(self) -> Iterator[_Run]:
        """Yield this run, then one whose tensors are reloaded at their first use, and both without
        recomputation, and without parts: among more actions the greedy planner may end at a higher peak.
        """
        limits = self._limits
        ways = (limits.parts, limits.again), (limits.parts, False), ((), False)
        for parts, again in dict.fromkeys(ways):
            for prefetch in dict.fromkeys((limits.prefetch, 0)):
                less = replace(limits, parts=parts, prefetch=prefetch, again=again)
                same = less == limits
                yield self if same else _Run(self.step, self._later, self.hardware, self._program, less)

    @cached_property
    def _decisions(self) -> Decisions:
        limits = self._limits
        return decisions(
            self.step,
            self.hardware,
            self._program.ranks,
            self._program.micro_batch,
            limits.min_bytes,
            limits.parts,
            prefetch=limits.prefetch > 0,
            again=limits.again,
        )

    @cached_property
    def _problem(self) -> Problem:
        return self._decisions.problem(self._timeline())

    @property
    def floor_bytes(self) -> int:
        """Return a lower bound of every plan's peak, by the planner's prices."""
        return self._problem.floor_bytes

    def nothing(self, peak_bytes: int, budget_bytes: int) -> TsplitSolution:
        """Return the plan without actions; `peak_bytes` may be that of the planner instead of its own."""
        plan = Decided([frozenset()] * len(self.step.blocks), {}, 0).to_plan()
        return TsplitSolution(plan, peak_bytes, self.plain_bytes, budget_bytes)

    def peak_bytes(self, step: Step) -> int:
        """Return the peak of `step` after every later pass."""
        return int(live_bytes(self._after(step), self.hardware).max(initial=0))

    def solve_tsplit(self, aim_bytes: int) -> TsplitSolution:
        """Return the planner's plan for a budget, with its true peak."""
        found = solve(self._problem, aim_bytes)
        chosen = Decided(*_chosen(self.step, self._decisions, found), self._limits.prefetch)
        new = rewrite_step(self._program, chosen, self._limits.min_bytes)
        peak = self.peak_bytes(new)
        outcome = TsplitOutcome(
            peak_bytes=peak,
            plain_bytes=self.plain_bytes,
            offloaded_bytes=_moved_bytes(new),
            added_s=round(found.added_s, 9),
        )
        return TsplitSolution(chosen.to_plan(outcome), peak, self.plain_bytes, aim_bytes)

    def _after(self, step: Step) -> Step:
        return apply_later_passes(self._program.with_step(step), self._later, self.hardware).step

    def _timeline(self) -> I64:
        """Return (n,) live bytes, raised between blocks by the growth of the peak under later passes."""
        live, after = live_bytes(self.step, self.hardware), self._after_plain
        if after is self.step:
            return live
        order = np.arange(len(self.step.blocks), dtype=np.int32)
        mine, theirs = windows(self.step, order), windows(after, order)
        more = np.maximum.reduceat(live_bytes(after, self.hardware), theirs) - np.maximum.reduceat(live, mine)
        found: I64 = live + np.repeat(more, np.diff(np.append(mine, self.step.ops.n)))
        return found


def _moved_bytes(step: Step) -> int:
    copies = np.asarray([name == "memtune.to_host.default" for name in step.names], bool)[step.ops.name]
    return int(step.ops.traffic_bytes[copies].sum())


def _chosen(
    step: Step, options: Decisions, found: PlanResult
) -> tuple[list[frozenset[OpAddress]], dict[str, Tiling]]:
    """Return the calls to offload, by block, and the modules to tile, from the planner's choice."""
    # Choice 0 leaves a tensor or a module as it is.
    taken = [(each, number) for each, number in zip(options.of, found.choice, strict=True) if number]
    split = [
        (each.region, each.tilings[number - 1]) for each, number in taken if isinstance(each, TiledModule)
    ]
    calls: list[frozenset[OpAddress]] = []
    for block in range(len(step.blocks)):
        mine = {
            region.forward[0]: (region, tiling.parts)
            for region, tiling in split
            if step.ops.block[region.forward[0]] == block
        }
        ops = {each.op for each, _ in taken if not isinstance(each, TiledModule) and each.block == block}
        for region, tiling in split:
            # Run in parts alone, a module saves its inner tensors, which are offloaded part by part.
            if region.forward[0] in mine and not tiling.again:
                ops |= set(region.forward) & _saving(step, region)
        # Modules that run in parts have other calls, which are addressed part by part.
        address = calls_in_parts(step, block, mine) if ops else {}
        calls.append(frozenset().union(*(frozenset([INPUTS]) if op < 0 else address[op] for op in ops)))
    return calls, {region.module: tiling for region, tiling in split}


def _saving(step: Step, region: PositionWise) -> set[int]:
    """Return the ops whose outputs the module saves."""
    return set(step.storages.producer[step.saves.storage[list(region.saves)]].tolist())


@dataclass(frozen=True)
class Decided:
    """The decisions of a plan, block by block."""

    offloaded: list[frozenset[OpAddress]]
    """Calls whose saved outputs are offloaded, by block."""
    split: dict[str, Tiling]
    """Division of modules into parts, by name."""
    prefetch: int
    """Number of prefetched tensors."""

    def to_plan(self, outcome: TsplitOutcome | None = None) -> TsplitPlan:
        """Return the decisions as a plan, in which equal blocks share an entry."""
        different = tuple(dict.fromkeys(self.offloaded))
        blocks = tuple(different.index(each) for each in self.offloaded)
        return TsplitPlan(
            offloaded=different,
            blocks=blocks,
            split={name: tiling.parts for name, tiling in self.split.items()},
            again=tuple(name for name, tiling in self.split.items() if tiling.again),
            by_sample=tuple(name for name, tiling in self.split.items() if tiling.by_sample),
            prefetch=self.prefetch,
            predicted=outcome,
        )

    @classmethod
    def from_plan(cls, plan: TsplitPlan, blocks: int) -> Decided:
        """Return the decisions of `plan` for a model of `blocks` blocks.

        Raises:
            ApplyError: The plan is for another number of blocks.
        """
        technique, fix = (f"offload.activations: {{kind: {kind}}}" for kind in ("tsplit", "copy_out"))
        refusals.require_blocks(len(plan.blocks), blocks, technique, fix)
        split = {
            name: Tiling(parts, name in plan.again, name in plan.by_sample)
            for name, parts in plan.split.items()
        }
        return cls([plan.offloaded[i] for i in plan.blocks], split, plan.prefetch)


def rewrite_step(program: Program, decided: Decided, min_bytes: int) -> Step:
    """Return the program's step with modules in parts, D2H copies after each save, and H2D copies."""
    split = tuple(sorted(decided.split.items(), key=lambda each: each[0]))
    return _moved(
        _in_parts(program.step, split, program.micro_batch),
        tuple(decided.offloaded),
        min_bytes,
        decided.prefetch,
    )


@memoized
def _in_parts(step: Step, split: tuple[tuple[str, Tiling], ...], samples: int) -> Step:
    again = {name: tiling.parts for name, tiling in split if tiling.again}
    if again:
        regions = [each for each in tileable(step, samples) if each.module in again]
        step = tile_regions(step, tuple((each, again[each.module]) for each in regions))
    kept = {name: tiling.parts for name, tiling in split if not tiling.again}
    # Found again: the ops of other modules have moved.
    regions = [each for each in tileable(step, samples) if each.module in kept] if kept else []
    return split_regions(step, regions, [kept[each.module] for each in regions]) if regions else step


@memoized
def _moved(step: Step, offloaded: tuple[frozenset[OpAddress], ...], min_bytes: int, prefetch: int) -> Step:
    """Return `step` with the copies; cached, so that equal plans of many budgets give the same object."""
    claims = [OffloadClaim(i, 1.0, min_bytes, calls) for i, calls in enumerate(offloaded) if calls]
    return move_activations(step, claims, prefetch=prefetch)
