"""Find the fastest plan whose program, after every later pass, stays within an exact byte budget.

The planner prices plans by the windows that blocks cut a step into. Passes that come later (sharding, a host
optimizer) change the memory besides activations, so prices start from the plain program after those passes.
The plan found is then rewritten and run through the later passes. If its true peak differs from its price,
the next plan is looked up with the budget corrected by the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from memtune.hardware import Hardware
from memtune.program import I32, Program, RankClass, Step, memoized
from memtune.search_spaces import PASS_ORDER, is_null
from memtune.search_spaces._pass_pipeline import TrackedSlots, check_fit, run_pass, run_passes, visible_parts
from memtune.search_spaces.recompute._block_planner.frontier import Frontier, solve
from memtune.search_spaces.recompute._block_planner.measured_options import (
    Levels,
    apply_options,
    levels,
    live_bytes,
    moments,
    op_seconds,
)
from memtune.technique import PassStage, Target, Technique

_TRIES = 8
"""Plans rewritten in search of the best one."""
_REFINE_TRIES = 4 * _TRIES
"""Plans rewritten in `_Search.refined`, where prices are inaccurate."""
_COSTLY = 0.02
"""Part of the plain step's time from which the host seconds of a plan's claims are noticeable."""
_PRICE_TOLERANCE = 0.02
"""Largest excess of the true peak over its price, as a fraction of the price."""


@dataclass(frozen=True)
class Budget:
    """Largest peak allowed: bytes, or a fraction between the smallest possible peak and the plain one."""

    n_bytes: int | None = None
    share: float | None = None
    host: bool = True
    """Tensors may be offloaded to host memory."""


@dataclass(frozen=True, eq=False)
class Solution:
    """The plan found for a budget, with the limits of the budget's range."""

    levels: Levels
    choice: I32
    """(blocks,) option of each block, in the order in which blocks run."""
    peak_bytes: int
    """Peak of the whole program after every later pass."""
    seconds: float
    """Seconds added to the plain step."""
    budget_bytes: int
    smallest_bytes: int
    """Smallest peak of any plan; a budget below it cannot be met."""
    plain_bytes: int
    """Peak without recompute and offload."""

    claims_s: float = 0.0
    """Part of `seconds` that the host spends on hooks and modes."""
    plain_s: float = math.inf
    """Seconds of the plain step's ops."""

    @property
    def is_within(self) -> bool:
        """True if the budget is met."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def has_costly_claims(self) -> bool:
        """True if hooks and modes take a part of the step that is worth a search for a schedule."""
        return self.claims_s > _COSTLY * self.plain_s


def solve_budget(program: Program, budget: Budget, target: Target) -> Solution:
    """Return the fastest plan for `program` within `budget`, or the plan with the smallest peak if none is.

    Cached by program, budget and later techniques.
    """
    return _solve_budget(
        program.step,
        budget,
        later_techniques(target),
        target.hardware,
        program.ranks,
        program.micro_batch,
        program.accumulate,
        later_pass_inputs(target),
    )


@dataclass(frozen=True)
class PassInputs:
    """Inputs of the later passes other than the techniques themselves."""

    recompute: Technique | None = None
    """The recompute technique, if activations are offloaded: what runs again must not be prefetched."""


NO_PASS_INPUTS = PassInputs()


def later_pass_inputs(target: Target) -> PassInputs:
    """Return what the techniques after recompute read of `target`, so that targets share cached plans."""
    moves = any(each.slot == "offload.activations" for each in later_techniques(target))
    return PassInputs(target.chosen.get("recompute") if moves else None)


def plain_bytes(
    program: Program,
    later: tuple[Technique, ...],
    hardware: Hardware,
    pass_inputs: PassInputs = NO_PASS_INPUTS,
) -> int:
    """Return the peak of `program` without recompute after every pass of `later`; no plan is solved."""
    return _plain_bytes(
        program.step, later, hardware, program.ranks, program.micro_batch, program.accumulate, pass_inputs
    )


@lru_cache(maxsize=256)
def _plain_bytes(
    step: Step,
    later: tuple[Technique, ...],
    hardware: Hardware,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    pass_inputs: PassInputs = NO_PASS_INPUTS,
) -> int:
    program = Program((RankClass(ranks, step),), micro_batch, accumulate)
    return int(
        live_bytes(apply_later_passes(program, later, hardware, pass_inputs).step, hardware).max(initial=0)
    )


def later_techniques(target: Target, after: str = "recompute") -> tuple[Technique, ...]:
    """Return the chosen techniques whose passes come after the slot `after` and change the step."""
    # If ranks hold parts of a model, the technique that made the parts comes first: its pass has
    # already run, but later passes ask it which ranks hold the same part.
    chosen = target.chosen
    later = tuple(
        chosen[slot] for slot in _later_slots(after) if slot in chosen and _changes_step(chosen[slot])
    )
    parallel = chosen.get("sharding.parallel")
    return later if parallel is None or parallel.ranks_of_a_copy(target.ranks) == 1 else (parallel, *later)


def apply_later_passes(
    program: Program,
    later: tuple[Technique, ...],
    hardware: Hardware,
    pass_inputs: PassInputs = NO_PASS_INPUTS,
) -> Program:
    """Return `program` after every pass of `later` that fits it; equal beginnings share cached results."""
    # Passes on the whole step are skipped: gradient sums inside a group are formed in place once per
    # step, and a pipeline has `steps_of_stages`.
    chosen = {each.slot: each for each in later} | (
        {} if pass_inputs.recompute is None else {"recompute": pass_inputs.recompute}
    )

    def passed(reached: _PassResult, technique: Technique, _: PassStage) -> _PassResult:
        after = _after(reached.program, technique, chosen, hardware)
        return replace(reached, refused=True) if after is None else _PassResult(after)

    done = run_passes(
        _PassResult(_interned_program(*_fields(program))),
        [each for each in later if each.slot != "sharding.parallel"],
        passed=passed,
        refused=lambda each: each.refused,
        stages=(PassStage.AXES,),
    )
    return done.program


def _fields(program: Program) -> tuple[Any, ...]:
    return tuple(getattr(program, each.name) for each in fields(Program))


@memoized
def _interned_program(*of: Any) -> Program:
    """Return the same Program object for equal fields."""
    # Caches compare programs by identity, and each plan is put into a new Program.
    return Program(*of)


@dataclass(frozen=True, eq=False)
class _PassResult:
    """The program after the passes run so far."""

    program: Program
    refused: bool = False
    """The next pass does not fit: it refuses the candidate whatever is planned here."""


def _after(
    program: Program, technique: Technique, chosen: dict[str, Technique], hardware: Hardware
) -> Program | None:
    """Return `program` after the pass of `technique` next to the `chosen` ones; None if it does not fit."""
    known = _known_results(program, technique, hardware)
    for seen, result in known:
        if all(chosen.get(slot) is other or chosen.get(slot) == other for slot, other in seen.items()):
            return result
    watched, after = TrackedSlots(chosen), None
    target = Target(hardware, program.ranks, None, watched)
    parts = visible_parts(technique, chosen, program.ranks)
    if check_fit(program, technique, target, parts) is None:
        after = run_pass(program, technique, target, parts)[0]
    known.append((watched.seen, after))
    # The list grew after the memo stored it: add the rows of `after` to the memo's count.
    _known_results.holds(after, program, technique, hardware)
    return after


@memoized
def _known_results(
    program: Program, technique: Technique, hardware: Hardware
) -> list[tuple[Mapping[str, Technique | None], Program | None]]:
    """Return the mutable cache of `_after`: for each result, the techniques read to compute it."""
    return []


def _later_slots(after: str) -> tuple[str, ...]:
    """Return the slots whose passes come after the slot `after` and change a program's bytes."""
    later = PASS_ORDER[PASS_ORDER.index(after) + 1 :]
    return tuple(slot for slot in later if slot != "allocator")


def _changes_step(technique: Technique) -> bool:
    return not is_null(technique)


@lru_cache(maxsize=64)
def _solve_budget(
    step: Step,
    budget: Budget,
    later: tuple[Technique, ...],
    hardware: Hardware,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    pass_inputs: PassInputs = NO_PASS_INPUTS,
) -> Solution:
    search = _search(step, budget.host, later, hardware, ranks, micro_batch, accumulate, pass_inputs)
    smallest, plain = search.smallest_bytes, search.plain_bytes
    budget_bytes = budget.n_bytes
    if budget_bytes is None:
        # `share` interpolates between the smallest peak of any plan and the plain one.
        budget_bytes = smallest + round((plain - smallest) * (budget.share or 0.0))
    row = search.best_row(budget_bytes)
    peak = search.peak_of(row)
    seconds = float(search.frontier.seconds[row])
    choice = search.frontier.choice(row)
    # Where prices are accurate, no other plan fits if the frontier has none.
    beyond = peak > budget_bytes and not search.is_price_accurate
    other = search.faster_technique_plan(math.inf if beyond else seconds, budget_bytes)
    if other is None and beyond:
        other = search.smallest_technique_plan
    if other is not None and beyond:
        other = search.refined(other, budget_bytes)
    if other is not None:
        peak, seconds, choice = other
    claims, places = search.levels.claims_s, np.arange(len(choice))
    return Solution(
        levels=search.levels,
        choice=choice,
        peak_bytes=peak,
        seconds=seconds,
        budget_bytes=budget_bytes,
        smallest_bytes=smallest,
        plain_bytes=plain,
        claims_s=0.0 if claims is None else float(claims[places, choice].sum()),
        plain_s=float(op_seconds(step, hardware, ranks).sum()),
    )


class _Search:
    """Plans of one program, by row of its frontier; true peaks are computed on demand."""

    def __init__(
        self,
        found: Levels,
        later: tuple[Technique, ...],
        program: Program,
        hardware: Hardware,
        pass_inputs: PassInputs,
    ) -> None:
        self.levels, self._later, self._program, self._hardware = found, later, program, hardware
        self._pass_inputs = pass_inputs
        after = self._after(found.step)
        self.plain_bytes = int(live_bytes(after.step, hardware).max(initial=0))
        self.frontier = solve(found.problem(moments(after.step, found.order, hardware)))
        self._peaks: dict[int, int] = {}
        self._other_peaks: dict[bytes, int] = {}

    def peak_of(self, row: int) -> int:
        """Return the peak of plan `row` after every pass."""
        if row not in self._peaks:
            # Rewriting and later passes cost far more than the lookup, so each row is computed once.
            self._peaks[row] = self._peak(self.frontier.choice(row))
        return self._peaks[row]

    def faster_technique_plan(self, seconds: float, budget_bytes: int) -> tuple[int, float, I32] | None:
        """Return peak, seconds and plan of the fastest other technique within the budget, if faster."""
        # The frontier contains every decision of these techniques, but one of them may still be
        # faster where the frontier overestimates its peak or is thinned out.
        for takes, i in sorted((self._other_seconds(i), i) for i in range(len(self.levels.others))):
            # Sorted by time, so none of the rest is faster.
            if takes >= seconds * (1 - 1e-9):
                break
            if self._other_peak(i) <= budget_bytes:
                return self._other_peak(i), takes, self.levels.others[i]
        return None

    def _other_seconds(self, i: int) -> float:
        return float(self.levels.seconds[np.arange(len(self.levels.order)), self.levels.others[i]].sum())

    def _other_peak(self, i: int) -> int:
        key = self.levels.others[i].tobytes()  # several techniques may make the same decisions
        if key not in self._other_peaks:
            self._other_peaks[key] = self._peak(self.levels.others[i])
        return self._other_peaks[key]

    @cached_property
    def is_price_accurate(self) -> bool:
        """True if the plan with the lowest price has that peak, so that no plan is smaller."""
        # If a backward runs inside of forward (gradients of gradients), blocks hold bytes that none
        # of their windows shows.
        return self.peak_of(0) <= int(self.frontier.peak_bytes[0]) * (1 + _PRICE_TOLERANCE)

    @cached_property
    def smallest_technique_plan(self) -> tuple[int, float, I32] | None:
        """Return peak, seconds and plan of a technique below the lowest-priced plan, if there is one."""
        peak, i = min(((self._other_peak(i), i) for i in range(len(self.levels.others))), default=(0, -1))
        return (
            (peak, self._other_seconds(i), self.levels.others[i])
            if i >= 0 and peak < self.peak_of(0)
            else None
        )

    def refined(self, plan: tuple[int, float, I32], budget_bytes: int) -> tuple[int, float, I32]:
        """Return `plan` with blocks, from the last, at the fastest level within the budget's true peak."""
        # Where prices are inaccurate, no row of the frontier shows the plans between two
        # techniques, so they are tried.
        peak, _, choice = plan
        tries, seconds = _REFINE_TRIES, self.levels.seconds
        # The last block's tensors live shortest, so holding them costs the least at the peak.
        for block in reversed(range(len(choice))):
            # `order` sorts this block's options by time; bisect for the fastest one that still fits.
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
        """Smallest peak that a known plan reaches."""
        other = None if self.is_price_accurate else self.smallest_technique_plan
        return self.peak_of(0) if other is None else other[0]

    def best_row(self, budget_bytes: int) -> int:
        """Return the row of the fastest plan within the budget by true peaks, else of the smallest plan."""
        return best_row(self.frontier, self.peak_of, budget_bytes)

    def _peak(self, choice: I32) -> int:
        step = _rewritten(self.levels, tuple(choice.tolist()))
        return int(live_bytes(self._after(step).step, self._hardware).max(initial=0))

    def _after(self, step: Step) -> Program:
        """Return the program with `step` after every later pass that fits it."""
        return apply_later_passes(
            self._program.with_step(step), self._later, self._hardware, self._pass_inputs
        )


def best_row(
    frontier: Frontier, peak_of: Callable[[int], int], budget_bytes: int, tries: int = _TRIES
) -> int:
    """Return the row of the fastest plan found within the budget by the true peaks of `peak_of`, else the
    smallest plan's row.
    """
    # Bisection over rows, guided by prices: the next row is the one priced within the budget after
    # subtracting the error of the last price.
    low, high, best = 0, len(frontier) - 1, 0
    row = max(
        frontier.row_within(budget_bytes + (budget_bytes >> 10)), 0
    )  # 0.1 % more: prices may be slightly too high
    for _ in range(tries):
        more = peak_of(row) - int(frontier.peak_bytes[row])
        if peak_of(row) <= budget_bytes:
            # Rows rise in bytes and fall in seconds: a higher row that fits is faster.
            best, low = max(best, row), row + 1
        else:
            high = row - 1
        row = min(frontier.row_within(budget_bytes - more), high)
        if row < low:  # no better plan is priced within the budget
            break
    return best


@memoized
def _rewritten(found: Levels, choice: tuple[int, ...]) -> Step:
    """Return the step under one option for each block, cached: later techniques ask for the same plans."""
    return apply_options(found.step, found.chosen(np.asarray(choice, np.int32)))


def _fixed_ratio_offload(later: tuple[Technique, ...]) -> Technique | None:
    """Return the technique of `later` that offloads a fixed fraction of each block's activations."""
    # A technique that plans for a budget itself is not priced here; its effect appears in the true peaks
    # alone.
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
    pass_inputs: PassInputs = NO_PASS_INPUTS,
) -> _Search:
    """Return the search over the options of all blocks of `step`, before the passes of `later`."""
    program = Program((RankClass(ranks, step),), micro_batch, accumulate)
    return _Search(
        levels(step, hardware, ranks, host, _fixed_ratio_offload(later)),
        later,
        program,
        hardware,
        pass_inputs,
    )
