"""The fastest plan whose program, after every later pass, stays within an exact byte budget.

The planner prices moments; the passes have the last word. Passes that come later (sharding, a host optimizer)
change what is there besides activations, so the planner is told the moments of the plain program after them,
and the plan that it finds is rewritten and run through them. Where its peak is not what was priced, the next
plan is looked up by as much more or less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from memtune.hardware import Hardware
from memtune.offload.layer_major import Span
from memtune.program import I32, I64, Program, RankClass, Step, remembered
from memtune.search_spaces import PASS_ORDER
from memtune.search_spaces._pass_pipeline import Watched, judged, made, parts_seen, run
from memtune.search_spaces._support import is_null
from memtune.search_spaces.recompute._block_planner.frontier import solve
from memtune.search_spaces.recompute._block_planner.measured_options import (
    Levels,
    levels,
    live_bytes,
    moments,
    rewritten,
)
from memtune.search_spaces.recompute._block_planner.pack_frontier import AnyFrontier, PackFrontier
from memtune.technique import PassStage, Plan, Target, Technique

_TRIES = 8
"""Plans that are rewritten in search of the best one."""
_FILLS = 4 * _TRIES
"""Likewise, where prices are wrong."""
_PRICED_WELL = 0.02
"""Part of a price by which the true peak may be more."""


@dataclass(frozen=True)
class Budget:
    """What the peak must stay within: bytes, or a share of the way from the smallest possible peak to the
    plain one.
    """

    n_bytes: int | None = None
    share: float | None = None
    host: bool = True
    """Tensors may go to host memory."""


@dataclass(frozen=True, eq=False)
class Solution:
    """One plan and its place among all others."""

    levels: Levels
    choice: I32
    """Option of each block in the order in which they run."""
    peak_bytes: int
    """Of the whole program after every later pass."""
    seconds: float
    """On top of the plain step."""
    budget_bytes: int
    smallest_bytes: int
    """The least peak that any plan gives; budgets below it cannot be met."""
    plain_bytes: int
    """The peak if everything is kept."""

    @property
    def is_within(self) -> bool:
        """Whether the budget is met."""
        return self.peak_bytes <= self.budget_bytes


def within(program: Program, budget: Budget, target: Target) -> Solution:
    """The fastest plan for `program` within `budget`, or the smallest one if none is.

    Solved once for a program, budget and set of later techniques; later calls look it up.
    """
    return _within(
        program.step,
        budget,
        later_techniques(target),
        target.hardware,
        program.ranks,
        program.micro_batch,
        program.accumulate,
        told_later(target),
    )


def packs_of(target: Target) -> Technique | None:
    """What runs blocks pack by pack, if anything does."""
    offload = target.chosen.get("offload.states")
    return offload if offload is not None and offload.effects.layer_major else None


def packs_in(technique: Technique, plan: Plan, blocks: int) -> tuple[Span, ...]:
    """The packs in which `technique` runs so many blocks backward; none where it is not layer-major."""
    packs = technique.effects.packs
    return () if packs is None else packs(plan, blocks)


@dataclass(frozen=True)
class Told:
    """What later techniques look at besides each other."""

    budget_bytes: int | None = None
    """What packs are made for; no other pass is for a budget."""
    recompute: Technique | None = None
    """Where activations move: who decides what runs again, since that is no block's business then to bring
    back ahead.
    """


NOTHING_TOLD = Told()


def told_later(target: Target) -> Told:
    """What the techniques after recompute are told of `target`: as little as can be, so that plans are
    shared.
    """
    budget = None if packs_of(target) is None else target.budget_bytes
    moves = any(each.slot == "offload.activations" for each in later_techniques(target))
    recompute = target.chosen.get("recompute") if moves else None
    return Told(budget, recompute)


def plain_bytes(
    program: Program, later: tuple[Technique, ...], hardware: Hardware, told: Told = NOTHING_TOLD
) -> int:
    """The peak of `program`, in which everything is kept, after every pass of `later`; it needs no plan to be
    looked for.
    """
    return _plain_bytes(
        program.step, later, hardware, program.ranks, program.micro_batch, program.accumulate, told
    )


@lru_cache(maxsize=256)
def _plain_bytes(
    step: Step,
    later: tuple[Technique, ...],
    hardware: Hardware,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    told: Told = NOTHING_TOLD,
) -> int:
    program = Program((RankClass(ranks, step),), micro_batch, accumulate)
    return int(live_bytes(after_later(program, later, hardware, told).step, hardware).max(initial=0))


def later_techniques(target: Target, after: str = "recompute") -> tuple[Technique, ...]:
    """What `target` has chosen of techniques whose passes come after the slot `after` and change something.

    Where ranks hold parts of a model, the technique that made the parts comes first: its pass has been, and
    the others see by it which ranks hold the same part.
    """
    chosen = target.chosen
    later = tuple(chosen[slot] for slot in _later_slots(after) if slot in chosen and _acts(chosen[slot]))
    parallel = chosen.get("sharding.parallel")
    return later if parallel is None or parallel.ranks_of_a_copy(target.ranks) == 1 else (parallel, *later)


def after_later(
    program: Program, later: tuple[Technique, ...], hardware: Hardware, told: Told = NOTHING_TOLD
) -> Program:
    """`program` after every pass of `later` that fits it; sets of techniques that begin alike share their
    first passes.

    Passes on the whole step are left out: sums inside a group are made in place once a step, a pipeline has
    `steps_of_stages`.
    """
    chosen = {each.slot: each for each in later} | (
        {} if told.recompute is None else {"recompute": told.recompute}
    )

    def passed(reached: _Reached, technique: Technique, _: PassStage) -> _Reached:
        after = _after(reached.program, technique, chosen, hardware, told.budget_bytes)
        return replace(reached, refused=True) if after is None else _Reached(after)

    done = run(
        _Reached(_one_object(*_fields(program))),
        [each for each in later if each.slot != "sharding.parallel"],
        passed=passed,
        refused=lambda each: each.refused,
        stages=(PassStage.AXES,),
    )
    return done.program


def _fields(program: Program) -> tuple[Any, ...]:
    return tuple(getattr(program, each.name) for each in fields(Program))


@remembered
def _one_object(*of: Any) -> Program:
    """The same program for equal fields: programs are known by identity, and each plan is put into a
    new one.
    """
    return Program(*of)


@dataclass(frozen=True, eq=False)
class _Reached:
    """How far passes have come."""

    program: Program
    refused: bool = False
    """The next one does not fit: it refuses the candidate, whatever is planned here."""


def _after(
    program: Program,
    technique: Technique,
    chosen: dict[str, Technique],
    hardware: Hardware,
    budget_bytes: int | None,
) -> Program | None:
    """What the pass of `technique` makes of `program` beside others; None where it does not fit."""
    known = _ways(program, technique, hardware, budget_bytes)
    for seen, there in known:
        if all(chosen.get(slot) is other or chosen.get(slot) == other for slot, other in seen.items()):
            return there
    watched, after = Watched(chosen), None
    target, parts = (
        Target(hardware, program.ranks, budget_bytes, watched),
        parts_seen(technique, chosen, program.ranks),
    )
    if judged(program, technique, target, parts) is None:
        after = made(program, technique, target, parts)[0]
    known.append((watched.seen, after))
    _ways.holds(after, program, technique, hardware, budget_bytes)
    return after


@remembered
def _ways(
    program: Program, technique: Technique, hardware: Hardware, budget_bytes: int | None
) -> list[tuple[Mapping[str, Technique | None], Program | None]]:
    """What `_after` has found so far, with what the technique looked at of the others."""
    return []


def _later_slots(after: str) -> tuple[str, ...]:
    """Slots whose passes come after the slot `after` and change a program's bytes."""
    later = PASS_ORDER[PASS_ORDER.index(after) + 1 :]
    return tuple(slot for slot in later if slot != "allocator")


def _acts(technique: Technique) -> bool:
    return not is_null(technique)


@lru_cache(maxsize=64)
def _within(
    step: Step,
    budget: Budget,
    later: tuple[Technique, ...],
    hardware: Hardware,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    told: Told = NOTHING_TOLD,
) -> Solution:
    search = _search(step, budget.host, later, hardware, ranks, micro_batch, accumulate, told)
    smallest, plain = search.smallest_bytes, search.plain_bytes
    budget_bytes = budget.n_bytes
    if budget_bytes is None:
        budget_bytes = smallest + round((plain - smallest) * (budget.share or 0.0))
    row = search.best_row(budget_bytes)
    peak, seconds, choice = (
        search.peak_of(row),
        float(search.frontier.seconds[row]),
        search.frontier.choice(row),
    )
    beyond = peak > budget_bytes and not search.is_priced_well
    other = search.faster_other(math.inf if beyond else seconds, budget_bytes)
    if other is None and beyond:
        other = search.smallest_other
    if other is not None and beyond:
        other = search.filled_up(other, budget_bytes)
    if other is not None:
        peak, seconds, choice = other
    return Solution(search.levels, choice, peak, seconds, budget_bytes, smallest, plain)


class _Search:
    """Plans of one program by row of its frontier, with their true peaks as far as they were asked for."""

    def __init__(
        self, found: Levels, later: tuple[Technique, ...], program: Program, hardware: Hardware, told: Told
    ) -> None:
        self.levels, self._later, self._program, self._hardware = found, later, program, hardware
        self._told = told
        after = self._after(found.step)
        self.plain_bytes = int(live_bytes(after.step, hardware).max(initial=0))
        spans = self._packs()
        if spans and not found.uniform:
            self.frontier: AnyFrontier = PackFrontier(found, after, spans, hardware)
        else:
            self.frontier = solve(found.problem(moments(after.step, found.order, hardware)))
        self._peaks: dict[int, int] = {}
        self._other_peaks: dict[bytes, int] = {}

    def _packs(self) -> tuple[tuple[int, int], ...]:
        """Blocks that run together, of the plain program; none where no packs fit."""
        packs, program = next((each for each in self._later if each.effects.layer_major), None), self._program
        target = Target(
            self._hardware, program.ranks, self._told.budget_bytes, {each.slot: each for each in self._later}
        )
        if packs is None or packs.fits(program, target) is not None:
            return ()
        return packs_in(packs, packs.plan(program, target), len(program.step.blocks))

    def peak_of(self, row: int) -> int:
        """Peak of plan `row` after every pass."""
        if row not in self._peaks:
            self._peaks[row] = self._peak(self.frontier.choice(row))
        return self._peaks[row]

    def faster_other(self, seconds: float, budget_bytes: int) -> tuple[int, float, I32] | None:
        """Peak, seconds and plan of the fastest other technique within the budget that takes less than
        `seconds`, if any.

        The frontier has all their decisions, but where it is priced too high or thinned one of them may still
        be ahead.
        """
        for takes, i in sorted((self._other_seconds(i), i) for i in range(len(self.levels.others))):
            if takes >= seconds * (1 - 1e-9):
                break
            if self._other_peak(i) <= budget_bytes:
                return self._other_peak(i), takes, self.levels.others[i]
        return None

    def _other_seconds(self, i: int) -> float:
        return float(self.levels.seconds[np.arange(len(self.levels.order)), self.levels.others[i]].sum())

    def _other_peak(self, i: int) -> int:
        key = self.levels.others[i].tobytes()  # several techniques may decide the same
        if key not in self._other_peaks:
            self._other_peaks[key] = self._peak(self.levels.others[i])
        return self._other_peaks[key]

    @cached_property
    def is_priced_well(self) -> bool:
        """Whether the plan priced lowest has its price, so no plan is smaller.

        Where a backward runs inside of forward (gradients of gradients), blocks hold what no window of theirs
        shows.
        """
        return self.peak_of(0) <= int(self.frontier.peak_bytes[0]) * (1 + _PRICED_WELL)

    @cached_property
    def smallest_other(self) -> tuple[int, float, I32] | None:
        """Peak, seconds and plan of the smallest other technique, if that is smaller than what is priced
        lowest.
        """
        peak, i = min(((self._other_peak(i), i) for i in range(len(self.levels.others))), default=(0, -1))
        return (
            (peak, self._other_seconds(i), self.levels.others[i])
            if i >= 0 and peak < self.peak_of(0)
            else None
        )

    def filled_up(self, plan: tuple[int, float, I32], budget_bytes: int) -> tuple[int, float, I32]:
        """`plan` with block after block, from the last, at the fastest level that keeps its true peak within
        the budget.

        Where prices are wrong no row of the frontier says what lies between two techniques; so many plans are
        tried.
        """
        peak, _, choice = plan
        tries, seconds = _FILLS, self.levels.seconds
        for block in reversed(range(len(choice))):
            order = np.argsort(seconds[block], kind="stable")
            low, high = 0, int(np.flatnonzero(order == choice[block])[0])
            while low < high and tries > 0:
                middle, tries = (low + high) // 2, tries - 1
                tried = choice.copy()
                tried[block] = order[middle]
                if (found := self._peak(tried)) <= budget_bytes:
                    peak, choice, high = found, tried, middle
                else:
                    low = middle + 1
        return peak, float(seconds[np.arange(len(choice)), choice].sum()), choice

    @cached_property
    def smallest_bytes(self) -> int:
        """The least peak that a plan is known to give."""
        other = None if self.is_priced_well else self.smallest_other
        return self.peak_of(0) if other is None else other[0]

    def best_row(self, budget_bytes: int) -> int:
        """The fastest plan within the budget, by true peaks; the smallest one if none is."""
        return best_row(self.frontier, self.peak_of, budget_bytes)

    def _peak(self, choice: I32) -> int:
        step = _rewritten(self.levels, tuple(choice.tolist()))
        return int(live_bytes(self._after(step).step, self._hardware).max(initial=0))

    def _after(self, step: Step) -> Program:
        """The program with `step` after every later pass that fits it."""
        return after_later(self._program.with_step(step), self._later, self._hardware, self._told)


class Rows(Protocol):
    """Plans worth having: peaks ascending, seconds descending."""

    @property
    def peak_bytes(self) -> I64:
        """(plans,) as priced."""

    def __len__(self) -> int:
        """Number of plans."""

    def at(self, budget_bytes: int) -> int:
        """Row of the fastest plan that is priced within the budget, -1 if there is none."""


def best_row(frontier: Rows, peak_of: Callable[[int], int], budget_bytes: int, tries: int = _TRIES) -> int:
    """Row of the fastest plan found within the budget, by true peaks as `peak_of` gives them; the smallest
    one if none is.
    """
    low, high, best = 0, len(frontier) - 1, 0
    row = max(frontier.at(budget_bytes + (budget_bytes >> 10)), 0)  # prices may be a little too high
    for _ in range(tries):
        more = peak_of(row) - int(frontier.peak_bytes[row])
        if peak_of(row) <= budget_bytes:
            best, low = max(best, row), row + 1
        else:
            high = row - 1
        row = min(frontier.at(budget_bytes - more), high)
        if row < low:  # nothing better is priced within the budget
            break
    return best


@remembered
def _rewritten(found: Levels, choice: tuple[int, ...]) -> Step:
    """The step under one option for each block: the same few are asked for under every set of later
    techniques.
    """
    return rewritten(found.step, found.chosen(np.asarray(choice, np.int32)))


def _mover(later: tuple[Technique, ...]) -> Technique | None:
    """What of `later` moves the same part of each block whatever the budget; what plans for one shows in the
    true peaks alone.
    """
    found = next((each for each in later if each.slot == "offload.activations"), None)
    return found if getattr(found, "ratio", None) is not None else None


@lru_cache(maxsize=64)
def _search(
    step: Step,
    host: bool,
    later: tuple[Technique, ...],
    hardware: Hardware,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    told: Told = NOTHING_TOLD,
) -> _Search:
    program = Program((RankClass(ranks, step),), micro_batch, accumulate)
    return _Search(levels(step, hardware, ranks, host, _mover(later)), later, program, hardware, told)
