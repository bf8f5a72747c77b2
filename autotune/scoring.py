"""Every candidate predicted, equal ones merged, in the order in which they are worth trying."""

from __future__ import annotations

import gc
import heapq
import math
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from memtune.autotune.allocator_model import AllocatorSettings
from memtune.autotune.calibrate import residuals
from memtune.autotune.candidates import Choice, Rewriter
from memtune.autotune.host_memory import no_room_on_ssd, too_little
from memtune.autotune.side_by_side import SideBySide
from memtune.autotune.simulate import Calibration, Prediction, simulate
from memtune.autotune.space import ENUMERATE_UP_TO, SAMPLE, Space
from memtune.cores import usable_cores
from memtune.hardware import Hardware
from memtune.program import Program
from memtune.runtime.op_times import OpTime
from memtune.technique import Reason

Goal = Literal["throughput", "memory", "batch"]
EVENTS_FOR = 64
"""The best this many are simulated again, op by op, and as many more at a time as may be better than the best of them …"""
_MOST_EVENTS = 4 * EVENTS_FOR
"""… but no more than this: of hundreds that promise the same, one is as good as the others."""
_ALL = ("all",)
_SMALL = tuple(("small", place) for place in range(4))
"""So many of those that need least memory are looked around, too."""
_SLOWER = 2.0
"""A kind whose best takes so many times as long as the best of all is not looked around: another slot does not make up for it."""
_MUCH = 0.01
"""The best with a kind is looked around again when it has become so much better."""
_PROCESSES = 4
"""At most so many score side by side: each remembers programs of its own."""
_COLLECT_AFTER = 50_000
"""While candidates are made, garbage is looked for each time there are so many objects more."""
_KEPT = 64
"""Programs whose prediction is remembered; in pass order what becomes the same program is close together."""


@dataclass(frozen=True)
class Scored:
    """A candidate and what the simulator says of it."""

    choice: Choice
    key: str
    prediction: Prediction

    def rank(self, goal: Goal) -> tuple[float, ...]:
        """Smaller is better for `goal`; ties go to the candidate that is faster, needs less and is simpler."""
        # The levels differ by more than candidates do, so they are never compared: what was looked at more closely comes first.
        return (self.prediction.level != "events", *self.rank_among_levels(goal))

    def rank_among_levels(self, goal: Goal, *, slower: float = 1.0) -> tuple[float, ...]:
        """`rank` when it may take `slower` times as long as predicted; the coarse level is too hopeful beside the other."""
        step_per_sample = slower / self.prediction.samples_per_s if self.prediction.samples_per_s else math.inf
        peak = float(self.prediction.peak_allocated_bytes)
        first = {"throughput": step_per_sample, "memory": peak, "batch": -float(self.choice.execution.micro_batch or 0)}[goal]
        return (first, step_per_sample, peak, *self.choice.complexity)


@dataclass(frozen=True)
class Scores:
    """The whole space as the simulator sees it."""

    by_key: dict[str, Scored]
    unfit: Mapping[str, int]
    """How many candidates were refused, by reason."""
    n_candidates: int
    n_merged: int
    score_s: float

    @property
    def n_unfit(self) -> int:
        """Candidates that some technique refused."""
        return sum(self.unfit.values())


class Asked(NamedTuple):
    """What `Scorer.asked` is asked about."""

    choice: Choice
    scored: Scored | None = None
    """Its score, which is to be refined; None: it is to be scored."""


_SideBySide: TypeAlias = SideBySide[Asked, Scored | Reason]


class Scorer:
    """Predicts choices; those that become the same program are simulated once, unless too many others came between.

    Args:
        rewriter: Makes programs of choices, for a target.
        op_times: What earlier searches on this machine told of its ops.
        calibration: What trials said of whole steps and peaks, if predictions are to hold it already.
        host_bytes: Free on the host of a node; None: not known, and nothing is refused for it.
        ssd_bytes: Free on the drives of a node, likewise.
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
        self._host_bytes, self._ssd_bytes = host_bytes, ssd_bytes
        self._known: dict[int, tuple[Program, Prediction]] = {}
        self._hardware = self._taught_by(())

    def learn(self, op_times: Iterable[OpTime]) -> None:
        """Let what trials told of their ops correct all later predictions, in the place of what was learnt this way before."""
        self._hardware = self._taught_by(op_times)
        self._known.clear()

    def _taught_by(self, op_times: Iterable[OpTime]) -> Hardware:
        hardware = self.rewriter.target.hardware
        return replace(hardware, residuals=residuals((*self._op_times, *op_times), hardware))

    def score(self, choice: Choice, *, level: Literal["coarse", "events"] = "coarse") -> Scored | Reason:
        """`choice` with its prediction, or why it does not fit."""
        candidate = self.rewriter.candidate(choice)
        if isinstance(candidate, Reason):
            return candidate
        prediction = (
            self._coarse(candidate.program) if level == "coarse" else self._events(choice, candidate.program, self._hardware)
        )
        target, keeps = self.rewriter.target, any(each.keeps_steps() for each in choice.chosen.values())
        reason = too_little(prediction, target, self._host_bytes)
        reason = reason or no_room_on_ssd(prediction, target, self._ssd_bytes, keeps_steps=keeps)
        return Scored(choice, candidate.key, prediction) if reason is None else reason

    def _coarse(self, program: Program) -> Prediction:
        known = self._known.get(id(program))
        if known is None or known[0] is not program:  # an id may come again when its program is gone
            if len(self._known) >= _KEPT:
                del self._known[next(iter(self._known))]  # the oldest
            as_held = self._host_bytes is not None  # else nobody asks, of candidates that nobody sees
            prediction = simulate(program, self._hardware, calibration=self._calibration, as_held=as_held)
            known = self._known[id(program)] = program, prediction
        return known[1]

    def again(self, scored: Scored, *, taught_by: Iterable[OpTime] | None = None) -> Scored:
        """`scored` predicted once more, at the events level; with `taught_by`, as if nothing else had been learnt."""
        hardware = self._hardware if taught_by is None else self._taught_by(taught_by)
        return replace(scored, prediction=self._events(scored.choice, self.program(scored.choice), hardware))

    def _events(self, choice: Choice, program: Program, hardware: Hardware) -> Prediction:
        allocator = AllocatorSettings.from_env(choice.env())
        return simulate(program, hardware, level="events", allocator=allocator, calibration=self._calibration)

    def program(self, choice: Choice) -> Program:
        """What `choice`, which fitted when it was scored, becomes."""
        candidate = self.rewriter.candidate(choice)
        assert not isinstance(candidate, Reason)
        return candidate.program

    def asked(self, asked: Asked) -> Scored | Reason:
        """A choice scored, or its score refined."""
        return self.score(asked.choice) if asked.scored is None else self.refined(asked.scored)

    def refined(self, scored: Scored) -> Scored:
        """`scored` with the prediction of the events level, the one that trials are compared with."""
        return scored if scored.prediction.level == "events" else self.again(scored)


@contextmanager
def settled() -> Iterator[None]:
    """While many candidates are made, garbage collections are few and leave out what is there now (torch, the recording).

    Each would look through all of it again, for a tenth of a second, and through all remembered programs; candidates leave hardly
    any cycles to be found. What somebody has frozen before stays frozen.
    """
    is_ours, thresholds = gc.get_freeze_count() == 0, gc.get_threshold()
    gc.freeze()
    if thresholds[0]:  # else somebody has turned them off
        gc.set_threshold(max(thresholds[0], _COLLECT_AFTER), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_ours:
            gc.unfreeze()


def score_all(space: Space, scorer: Scorer, goal: Goal, *, seed: int = 0) -> Scores:
    """Score the whole space; where it is larger than `ENUMERATE_UP_TO`, a sample and what lies around the best; refine the best.

    Around the best means: another technique, or other knobs, in one slot. That is looked through until it finds nothing better.
    """
    started = time.monotonic()
    with settled(), SideBySide(scorer.asked, lambda asked: same_passes(asked.choice), processes()) as side_by_side:
        found = _Found(scorer, side_by_side)
        if space.size <= ENUMERATE_UP_TO:
            found.add(space)
        else:
            found.add(space.sample(SAMPLE, seed))
            looked_around: dict[Hashable, Scored] = {}
            while promising := found.promising(goal, looked_around):
                found.add(space.around([each.choice for each in promising.values()]))
                looked_around |= promising
        _refine(found.by_key, side_by_side, scorer.rewriter.target.budget_bytes, goal)
    return Scores(found.by_key, dict(found.unfit), len(found.seen), found.n_merged, time.monotonic() - started)


def processes() -> int:
    """How many work side by side."""
    return min(usable_cores(), _PROCESSES)


def same_passes(choice: Choice) -> Hashable | None:
    """Choices whose first passes are the same share programs. What must be recorded again is recorded in this process."""
    if choice.execution.compile or "sharding.parallel" in choice.chosen:
        return None
    first = (choice.chosen.get(slot) for slot in ("split", "recompute"))
    return choice.execution, *first


class _Found:
    """What has been scored so far; of equal candidates the simplest is kept."""

    def __init__(self, scorer: Scorer, side_by_side: _SideBySide) -> None:
        self._scorer, self._side_by_side = scorer, side_by_side
        self.by_key: dict[str, Scored] = {}
        self.unfit: Counter[str] = Counter()
        self.seen: set[Choice] = set()
        self.n_merged = 0
        self._predictions: dict[Hashable, list[Prediction]] = defaultdict(list)
        """One object for what is predicted the same: it is one program, whichever process made it (see `_refine`)."""

    def add(self, choices: Iterable[Choice]) -> None:
        """Score those that were not seen yet."""
        new = [choice for choice in dict.fromkeys(choices) if choice not in self.seen]
        self.seen.update(new)
        for choice, scored in zip(new, self._side_by_side.over([Asked(choice) for choice in new]), strict=True):
            if isinstance(scored, Reason):
                self.unfit[str(scored)] += 1
                continue
            # A copy's choice is another object, and objects are known by their id.
            scored = replace(scored, choice=choice, prediction=self._one_object(scored.prediction))
            known = self.by_key.get(scored.key)
            self.n_merged += known is not None
            if known is None or choice.complexity < known.choice.complexity:
                self.by_key[scored.key] = scored

    def _one_object(self, prediction: Prediction) -> Prediction:
        alike = self._predictions[prediction.step_s, prediction.peak_allocated_bytes, prediction.host_peak_bytes]
        known = next((each for each in alike if each is prediction or each == prediction), None)
        if known is None:
            alike.append(prediction)
        return known or prediction

    def promising(self, goal: Goal, looked_around: Mapping[Hashable, Scored]) -> dict[Hashable, Scored]:
        """By what it is the best of, what is worth a look around: much better than what was looked around for that before.

        The best of all is so however little better it is. Kinds that even at best are several times slower than that are left.
        """
        best = self._best(goal)
        fastest = best[_ALL].rank(goal)[1] if goal == "throughput" and _ALL in best else math.inf
        found = {}
        for part, each in best.items():
            value, before = each.rank(goal)[1], looked_around.get(part)
            if before is not None:
                least = 0.0 if part == _ALL else _MUCH * abs(before.rank(goal)[1])
                if each.choice == before.choice or value > before.rank(goal)[1] - least:
                    continue
            if value <= _SLOWER * fastest or part in _SMALL:
                found[part] = each
        return found

    def _best(self, goal: Goal) -> dict[Hashable, Scored]:
        """With each micro-batch and each kind of technique the best within the budget, and what needs least memory of all.

        One for each kind, as the few best of all are often the same but for a knob.
        """
        budget = self._scorer.rewriter.target.budget_bytes
        best: dict[Hashable, Scored] = {}
        for each in sorted(self.by_key.values(), key=lambda each: each.rank(goal)):
            if budget is None or each.prediction.peak_allocated_bytes <= budget:
                for part in (each.choice.execution, *((one.slot, one.kind) for one in each.choice.techniques), _ALL):
                    best.setdefault(part, each)
        small = heapq.nsmallest(len(_SMALL), self.by_key.values(), key=lambda each: each.rank("memory"))
        return best | dict(zip(_SMALL, small, strict=False))


def _refine(by_key: dict[str, Scored], side_by_side: _SideBySide, budget_bytes: int | None, goal: Goal) -> None:
    """Simulate the best programs op by op, until no other may be better: the coarse level promises too much, never too little.

    What became one program shares one prediction object. Its reserved bytes are those under the allocator settings of the
    simplest of them.
    """
    programs: dict[int, list[Scored]] = {}
    for each in by_key.values():
        if budget_bytes is None or each.prediction.peak_allocated_bytes <= budget_bytes:
            programs.setdefault(id(each.prediction), []).append(each)
    ranked = heapq.nsmallest(_MOST_EVENTS, programs.values(), key=lambda group: min(each.rank(goal) for each in group))
    best: tuple[float, ...] = (math.inf,)
    for start in range(0, len(ranked), EVENTS_FOR):
        groups = ranked[start : start + EVENTS_FOR]
        if best < min(each.rank_among_levels(goal) for each in groups[0]):
            break
        simplest = [min(group, key=lambda each: each.choice.complexity) for group in groups]
        for group, refined in zip(groups, side_by_side.over([Asked(each.choice, each) for each in simplest]), strict=True):
            assert isinstance(refined, Scored)
            by_key.update({each.key: replace(each, prediction=refined.prediction) for each in group})
            if budget_bytes is None or refined.prediction.peak_allocated_bytes <= budget_bytes:
                best = min(best, refined.rank_among_levels(goal))


def predict_again(by_key: dict[str, Scored], scorer: Scorer) -> None:
    """Predict anew what was simulated op by op, in place, with what the scorer has learnt since.

    The coarse level comes after these in every ranking, so it keeps what it had.
    """
    known: dict[int, Prediction] = {}
    for key, each in by_key.items():
        if each.prediction.level == "events":
            known_as = id(each.prediction)  # neighbours that became one program share it
            if known_as not in known:
                known[known_as] = scorer.again(each).prediction
            by_key[key] = replace(each, prediction=known[known_as])


def alike(prediction: Prediction) -> tuple[object, ...]:
    """What the simulator can tell candidates apart by; of each group that is alike one is tried first."""
    return prediction.peak_allocated_bytes, prediction.peak_reserved_bytes, f"{prediction.step_s:.6g}"


def fits_budget(prediction: Prediction, budget_bytes: int | None, calibration: Calibration) -> bool:
    """Whether the expected peak, corrected by what trials measured, is within the budget."""
    if budget_bytes is None:
        return True
    low, high = calibration.peak_range() if calibration.is_calibrated else (1.0, 1.0)
    return prediction.peak_allocated_bytes * math.sqrt(low * high) <= budget_bytes
