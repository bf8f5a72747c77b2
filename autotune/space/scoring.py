"""Predict every candidate of a space, merge equal programs and refine the most promising ones."""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from memtune.autotune.predict import (
    AllocatorSettings,
    Calibration,
    HostShortage,
    ParallelMap,
    Prediction,
    PythonWork,
    host_memory_shortage,
    residuals,
    simulate,
    ssd_shortage,
)
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.autotune.space.preselection import Preselection, size_of
from memtune.autotune.space.search_space import ENUMERATE_UP_TO, SAMPLE, Space
from memtune.effects import DISPATCH_MODE
from memtune.garbage import rare_collections
from memtune.hardware import Hardware, OpTime, usable_cores
from memtune.program import Program
from memtune.progress import advance
from memtune.search_spaces import null
from memtune.search_spaces.execution import Execution
from memtune.technique import Reason, Technique

Goal = Literal["throughput", "memory", "batch"]
EVENTS_FOR = 64
"""Programs simulated op by op at a time; further batches follow while one may beat the best so far."""
_MOST_EVENTS = 4 * EVENTS_FOR
"""Limit on programs simulated op by op: hundreds with one coarse prediction need not all be refined."""
_ALL = ("all",)
_SMALL = tuple(("small", place) for place in range(4))
"""The neighbourhoods of this many candidates with the smallest peaks are explored too."""
_EXECUTIONS = 3
"""Number of executions (micro-batches) whose best candidates' neighbourhoods are explored. The best of most
micro-batches have the same techniques, so further neighbourhoods repeat those combinations.
"""
_SLOWER = 1.5
"""The neighbourhood of a technique is not explored if its best candidate is slower than the best of all by
this factor: no other slot makes up for it.
"""
_EXPLORE_AGAIN = 0.01
"""Relative improvement of a technique's best candidate that has its neighbourhood explored again."""
_ACTIVATIONS_SHARE = 0.5
"""Part of the budget that activations may take at the micro-batch at which pairs are compared."""
_PROCESSES = 4
"""Limit on scoring processes: each has a memory of programs of its own."""
_MOST_PREDICTIONS = 64
"""Number of programs whose prediction is kept; equal programs are close together in pass order."""


@dataclass(frozen=True)
class Scored:
    """A candidate and its prediction."""

    choice: Choice
    key: str
    prediction: Prediction
    coarse_s: float = 0.0
    """Step time at the coarse level, before the op times of trials were known; 0 unless it was refined."""

    def rank(self, goal: Goal) -> tuple[float, ...]:
        """Return the sort key for `goal`, smaller is better; ties go to the faster, smaller, simpler one."""
        # The levels differ by more than candidates do, so they are never compared: what was looked at more
        # closely comes first.
        return (self.prediction.level != "events", *self.rank_among_levels(goal))

    def rank_among_levels(self, goal: Goal) -> tuple[float, ...]:
        """Return `rank` without regard to the level, of which the coarse one is optimistic."""
        step_per_sample = 1 / self.prediction.samples_per_s if self.prediction.samples_per_s else math.inf
        peak = float(self.prediction.peak_allocated_bytes)
        first = {
            "throughput": step_per_sample,
            "memory": peak,
            "batch": -float(self.choice.execution.micro_batch or 0),
        }[goal]
        return (first, step_per_sample, peak, *self.choice.complexity)


@dataclass(frozen=True)
class Scores:
    """The scored space."""

    by_key: dict[str, Scored]
    unfit: Mapping[str, int]
    """Number of refused candidates, by reason."""
    n_candidates: int
    n_merged: int
    score_s: float
    short_of_host: HostShortage | None = None
    """The refused candidate within the budget that needs the least host memory."""

    @property
    def n_unfit(self) -> int:
        """Return the number of candidates that some technique refused."""
        return sum(self.unfit.values())


class ScoreRequest(NamedTuple):
    """A question to `Scorer.asked`."""

    choice: Choice
    scored: Scored | None = None
    """The score to refine; None scores the choice."""


_SideBySide: TypeAlias = ParallelMap[ScoreRequest, Scored | Reason]


class Scorer:
    """Predicts choices.

    Equal programs are simulated once, as long as the first prediction is still in memory.

    Args:
        rewriter: Makes programs of choices, for a target.
        op_times: Op times measured by earlier searches on this machine.
        calibration: Corrections from trials of whole steps and peaks, if predictions are to include them.
        host_bytes: Free host memory of a node; None if unknown, then nothing is refused for it.
        ssd_bytes: Free SSD space of a node, likewise.
    """

    def __init__(
        self,
        rewriter: Rewriter,
        *,
        op_times: Sequence[OpTime] = (),
        calibration: Calibration | None = None,
        host_bytes: int | None = None,
        ssd_bytes: int | None = None,
    ) -> None:
        self.rewriter, self._op_times, self._calibration = rewriter, tuple(op_times), calibration
        self.host_bytes, self._ssd_bytes = host_bytes, ssd_bytes
        self._known: dict[tuple[int, PythonWork], tuple[Program, Prediction]] = {}
        self._rates: dict[str, float] = {}
        self._hardware = self._taught_by(())

    @property
    def hardware(self) -> Hardware:
        """The target's hardware, corrected by the op times that were learnt."""
        return self._hardware

    def learn(self, op_times: Iterable[OpTime], rates: Mapping[str, float] | None = None) -> None:
        """Correct all later predictions by what trials measured, instead of what was given before."""
        self._rates = dict(rates or {})
        self._hardware = self._taught_by(op_times)
        # Predictions of the hardware as it was believed before.
        self._known.clear()

    def _taught_by(self, op_times: Iterable[OpTime]) -> Hardware:
        hardware = replace(self.rewriter.target.hardware, **self._rates)  # type: ignore[arg-type]  # numbers
        # Of a class that this search's trials timed, ops of other models tell nothing more.
        factors = residuals(self._op_times, hardware) | residuals(op_times, hardware)
        return replace(hardware, residuals=factors)

    def score(self, choice: Choice, *, level: Literal["coarse", "events"] = "coarse") -> Scored | Reason:
        """Return `choice` with its prediction, or why it does not fit."""
        candidate = self.rewriter.candidate(choice)
        if isinstance(candidate, Reason):
            return candidate
        prediction = self._coarse(candidate) if level == "coarse" else self._events(candidate, self._hardware)
        target, keeps = self.rewriter.target, any(each.effects.keeps_steps for each in choice.chosen.values())
        reason = host_memory_shortage(prediction, target, self.host_bytes)
        reason = reason or ssd_shortage(prediction, target, self._ssd_bytes, keeps_steps=keeps)
        return Scored(choice, candidate.key, prediction) if reason is None else reason

    def _coarse(self, candidate: Candidate) -> Prediction:
        """Return the coarse prediction; equal programs are simulated once."""
        # Equal programs may differ in the Python that runs besides them.
        program, python = candidate.program, python_work(candidate)
        known = self._known.get((id(program), python))
        if known is None or known[0] is not program:  # Python reuses the id of a program that was freed
            # Dicts keep the order of insertion, so the first key is the oldest.
            if len(self._known) >= _MOST_PREDICTIONS:
                del self._known[next(iter(self._known))]  # the oldest
            as_held = self.host_bytes is not None  # pinned sizes matter only if host memory is checked
            prediction = simulate(
                program, self._hardware, calibration=self._calibration, as_held=as_held, python=python
            )
            known = self._known[id(program), python] = program, prediction
        return known[1]

    def again(self, scored: Scored, *, taught_by: Iterable[OpTime] | None = None) -> Scored:
        """Return `scored` predicted again at the events level; `taught_by` replaces the op times learnt."""
        hardware = self._hardware if taught_by is None else self._taught_by(taught_by)
        # The step time that the first refinement replaced: later ones replace an `events` prediction.
        coarse_s = scored.coarse_s if scored.prediction.level == "events" else scored.prediction.step_s
        prediction = self._events(self.candidate(scored.choice), hardware)
        return replace(scored, prediction=prediction, coarse_s=coarse_s)

    def _events(self, candidate: Candidate, hardware: Hardware) -> Prediction:
        allocator = AllocatorSettings.from_env(candidate.choice.env())
        return simulate(
            candidate.program,
            hardware,
            level="events",
            allocator=allocator,
            calibration=self._calibration,
            python=python_work(candidate),
        )

    def program(self, choice: Choice) -> Program:
        """Return the program of `choice`, which must fit."""
        return self.candidate(choice).program

    def candidate(self, choice: Choice) -> Candidate:
        """Return `choice`, which must fit, with its plans and its program."""
        found = self.rewriter.candidate(choice)
        assert not isinstance(found, Reason)
        return found

    def asked(self, asked: ScoreRequest) -> Scored | Reason:
        """Return a choice's score, or a refined score."""
        return self.score(asked.choice) if asked.scored is None else self.refined(asked.scored)

    def refined(self, scored: Scored) -> Scored:
        """Return `scored` with the prediction of the events level, which trials are compared with."""
        return scored if scored.prediction.level == "events" else self.again(scored)


def python_work(candidate: Candidate) -> PythonWork:
    """Return the Python work of a step of `candidate` that its program does not show."""
    if not candidate.choice.techniques:
        return PythonWork()
    effects = [each.effects for each in candidate.choice.techniques]
    return PythonWork(
        observes_ops=any(each.eager_only == DISPATCH_MODE for each in effects),
        schedule_calls=sum(each.schedule_calls for each in candidate.plans.values()),
    )


def score_all(
    space: Space, scorer: Scorer, goal: Goal, *, seed: int = 0, most_sampled: int | None = None
) -> Scores:
    """Score the space, or a sample and neighbourhoods above `ENUMERATE_UP_TO`; refine the best."""
    # A neighbourhood: another technique, or other knobs, in one slot. It is explored until nothing
    # better is found. Settings that cannot be chosen are left out (`preselection`).
    started = time.monotonic()
    with (
        rare_collections(),
        ParallelMap(scorer.asked, lambda asked: same_passes(asked.choice), processes()) as side_by_side,
    ):
        preselection = Preselection(
            scorer.rewriter.target.budget_bytes,
            for_speed=goal == "throughput",
            optional_slots=[slot for slot, techniques in space.slots.items() if null(slot) in techniques],
        )
        found = _ScoredSet(scorer, side_by_side, goal, preselection)
        if space.size <= ENUMERATE_UP_TO:
            found.add(space)
        else:
            count = min(SAMPLE, most_sampled or SAMPLE)
            found.add(space.sample(count, seed, _execution_for_pairs(space, scorer)))
            looked_around: dict[Hashable, Scored] = {}
            # Hill climbing from several places at once: each round explores what the one before improved.
            while promising := found.promising(looked_around):
                found.add(space.around([each.choice for each in promising.values()]))
                looked_around |= promising
        _refine(found.by_key, side_by_side, scorer.rewriter.target.budget_bytes, goal)
    took_s = time.monotonic() - started
    return Scores(
        found.by_key, dict(found.unfit), found.n_scored, found.n_merged, took_s, found.short_of_host
    )


def _execution_for_pairs(space: Space, scorer: Scorer) -> Execution:
    """Return the largest micro-batch whose activations take a part of the budget only."""
    # Pairs of techniques tell most about each other there.
    first, budget_bytes = space.executions[0], scorer.rewriter.target.budget_bytes
    # Executions that differ in nothing but the micro-batch, the largest first, as bisection needs them.
    sizes = [each for each in space.executions if each == first.of_size(each.micro_batch, each.accumulate)]
    lean = {slot: techniques[0] for slot, techniques in space.slots.items()}
    lean |= {
        "recompute": next(
            (each for each in space.slots["recompute"] if each.kind == "full"), lean["recompute"]
        )
    }

    def peak_bytes(execution: Execution) -> float:
        scored = scorer.score(Choice.of(execution, lean))
        return math.inf if isinstance(scored, Reason) else scored.prediction.peak_allocated_bytes

    if budget_bytes is None or not sizes or math.isinf(least_bytes := peak_bytes(sizes[-1])):
        return first
    most_bytes = least_bytes + _ACTIVATIONS_SHARE * budget_bytes
    return sizes[bisect_left(sizes[:-1], True, key=lambda each: peak_bytes(each) <= most_bytes)]


def processes() -> int:
    """Return the number of processes that score in parallel."""
    return min(usable_cores(), _PROCESSES)


def same_passes(choice: Choice) -> Hashable | None:
    """Return a key of choices whose first passes are equal, which share programs.

    None for choices that need a recording, which only this process makes.
    """
    if choice.execution.compile or "sharding.parallel" in choice.chosen:
        return None
    first = (choice.chosen.get(slot) for slot in ("split", "recompute"))
    return choice.execution, *first


class _ScoredSet:
    """The candidates scored so far; of equal ones the simplest is kept."""

    def __init__(
        self, scorer: Scorer, side_by_side: _SideBySide, goal: Goal, preselection: Preselection
    ) -> None:
        self._scorer, self._side_by_side = scorer, side_by_side
        self._goal, self._preselection = goal, preselection
        self.by_key: dict[str, Scored] = {}
        self.unfit: Counter[str] = Counter()
        self.short_of_host: HostShortage | None = None
        self.seen: set[Choice] = set()
        self.n_scored = 0
        self.n_merged = 0
        self._predictions: dict[Hashable, list[Prediction]] = defaultdict(list)
        """One object for equal predictions, whichever process made them (see `_refine`)."""

    def add(self, choices: Iterable[Choice]) -> None:
        """Score choices that are new and that the preselection does not leave out."""
        rules = self._preselection
        new = []
        for choice in dict.fromkeys(choices):
            if choice in self.seen:
                continue
            if (reason := rules.refusal(choice)) is None:
                new.append(choice)
            else:
                self.seen.add(choice)
                self.n_scored += 1
                self.unfit[reason] += 1
        by_choice = {choice: rules.budgeted(choice) for choice in new}
        budgeted = [each for each in by_choice.values() if each is not None]
        bare = {one.without: None for one in budgeted if one.without not in self.seen}
        self.seen.update(bare, (each.choice for each in budgeted))
        self._score(bare)  # all of them: the time of a step without the technique says whether to solve it
        others = [choice for choice, each in by_choice.items() if each is None and choice not in bare]
        # By powers of two of the micro-batch, the smaller first: their peaks tell which larger ones to skip.
        for _, larger in groupby(sorted(others, key=size_of), key=lambda each: size_of(each).bit_length()):
            hopeful = [choice for choice in larger if not rules.is_surely_over(choice)]
            self.seen.update(hopeful)
            self._score(hopeful)
        rules.request(budgeted)
        waiting = {each.choice: each for each in budgeted}
        # Again after each round: a setting that turned out not to fit dominates none.
        while ready := rules.worth_solving(waiting.values()):
            self._score(ready)
            for choice in ready:
                rules.solved(waiting.pop(choice))

    def _score(self, choices: Iterable[Choice]) -> None:
        """Score `choices` side by side, and keep the simplest of those with equal programs."""
        requests = [ScoreRequest(choice) for choice in choices]
        scores = self._side_by_side.map(
            requests, lambda done: advance(self.n_scored + done, "settings", self.n_scored + len(requests))
        )
        self.n_scored += len(requests)
        for (choice, _), scored in zip(requests, scores, strict=True):
            if isinstance(scored, Reason):
                self.unfit[str(scored)] += 1
                if isinstance(scored, HostShortage) and self._preselection.fits(scored.peak_bytes):
                    least = self.short_of_host or scored
                    self.short_of_host = min(least, scored, key=lambda each: each.needed_bytes)
                continue
            # A copy's choice is another object, and objects are known by their id.
            scored = replace(scored, choice=choice, prediction=self._one_object(scored.prediction))
            self._preselection.add(choice, scored.prediction)
            known = self.by_key.get(scored.key)
            self.n_merged += known is not None
            if known is None or choice.complexity < known.choice.complexity:
                self.by_key[scored.key] = scored

    def _one_object(self, prediction: Prediction) -> Prediction:
        alike = self._predictions[
            prediction.step_s, prediction.peak_allocated_bytes, prediction.host_peak_bytes
        ]
        known = next((each for each in alike if each is prediction or each == prediction), None)
        if known is None:
            alike.append(prediction)
        return known or prediction

    def promising(self, looked_around: Mapping[Hashable, Scored]) -> dict[Hashable, Scored]:
        """Return the candidates whose neighbourhood to explore, by the property that they are best in."""
        # A candidate qualifies if it is much better than the one explored before for that property, or at all
        # better for the best overall. Techniques whose best is several times slower are skipped.
        goal = self._goal
        best = self._best(goal)
        fastest = best[_ALL].rank(goal)[1] if goal == "throughput" and _ALL in best else math.inf
        found = {}
        for part, each in best.items():
            value, before = each.rank(goal)[1], looked_around.get(part)
            if before is not None:
                least = 0.0 if part == _ALL else _EXPLORE_AGAIN * abs(before.rank(goal)[1])
                if each.choice == before.choice or value > before.rank(goal)[1] - least:
                    continue
            if value <= _SLOWER * fastest or part in _SMALL:
                found[part] = each
        return found

    def _best(self, goal: Goal) -> dict[Hashable, Scored]:
        """Return the best by micro-batch and by kind of technique, and those with the smallest peaks."""
        # One per kind, because the few best overall often differ in one knob only. Techniques by budget are
        # alternatives for the same bytes, and a neighbourhood has all of them, so they count as one kind.
        best: dict[Hashable, Scored] = {}
        executions: set[Execution] = set()
        for each in sorted(self.by_key.values(), key=lambda each: each.rank(goal)):
            # Sorted, so `setdefault` below keeps the best of each part.
            if self._preselection.fits(each.prediction.peak_allocated_bytes):
                parts: list[Hashable] = [_ALL, *map(_part, each.choice.techniques)]
                if len(executions) < _EXECUTIONS:
                    executions.add(each.choice.execution)
                    parts.append(each.choice.execution)
                for part in parts:
                    best.setdefault(part, each)
        small = heapq.nsmallest(len(_SMALL), self.by_key.values(), key=lambda each: each.rank("memory"))
        return best | dict(zip(_SMALL, small, strict=False))


def _part(technique: Technique) -> Hashable:
    return technique.slot, "by budget" if technique.by_budget else technique.kind


def _refine(
    by_key: dict[str, Scored], side_by_side: _SideBySide, budget_bytes: int | None, goal: Goal
) -> None:
    """Simulate the best programs op by op until no other can be better."""
    # The coarse level never overestimates the time.
    # Equal programs share one prediction object. Its reserved bytes are those of the simplest one's allocator
    # settings.
    programs: dict[int, list[Scored]] = {}
    for each in by_key.values():
        if each.prediction.is_within(budget_bytes):
            programs.setdefault(id(each.prediction), []).append(each)
    ranked = heapq.nsmallest(
        _MOST_EVENTS, programs.values(), key=lambda group: min(each.rank(goal) for each in group)
    )
    best: tuple[float, ...] = (math.inf,)
    for start in range(0, len(ranked), EVENTS_FOR):
        groups = ranked[start : start + EVENTS_FOR]
        # Groups are sorted by the coarse level, a lower bound: no later one can be better.
        if best < min(each.rank_among_levels(goal) for each in groups[0]):
            break
        # Equal programs have equal times, so one of each group is simulated.
        simplest = [min(group, key=lambda each: each.choice.complexity) for group in groups]
        requests = [ScoreRequest(each.choice, each) for each in simplest]
        refined_ones = side_by_side.map(requests, partial(_report_refined, start))
        for group, refined in zip(groups, refined_ones, strict=True):
            assert isinstance(refined, Scored)
            by_key.update(
                {
                    each.key: replace(each, prediction=refined.prediction, coarse_s=refined.coarse_s)
                    for each in group
                }
            )
            if refined.prediction.is_within(budget_bytes):
                best = min(best, refined.rank_among_levels(goal))


def _report_refined(before: int, done: int) -> None:
    advance(before + done, "settings simulated op by op")


def predict_again(by_key: dict[str, Scored], scorer: Scorer) -> None:
    """Predict again, in place, what was simulated op by op, with the op times learnt since."""
    # Coarse predictions come after these in every ranking, so they are kept.
    known: dict[int, Prediction] = {}
    for key, each in by_key.items():
        if each.prediction.level == "events":
            known_as = id(each.prediction)  # neighbours that became one program share it
            if known_as not in known:
                known[known_as] = scorer.again(each).prediction
            by_key[key] = replace(each, prediction=known[known_as])


def alike(prediction: Prediction) -> tuple[object, ...]:
    """Return the predicted values that tell candidates apart; one of each group of equals is tried first."""
    return prediction.peak_allocated_bytes, prediction.peak_reserved_bytes, f"{prediction.step_s:.6g}"


def fits_budget(prediction: Prediction, budget_bytes: int | None, calibration: Calibration) -> bool:
    """Return whether the expected peak, corrected by trials, is within the budget."""
    if budget_bytes is None:
        return True
    low, high = calibration.peak_range() if calibration.is_calibrated else (1.0, 1.0)
    return prediction.peak_allocated_bytes * math.sqrt(low * high) <= budget_bytes
