"""What to try next: two of three from the simulator's ranking, one of three from Optuna, nothing twice."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from memtune.autotune.candidates import Choice
from memtune.autotune.effects import Effects
from memtune.autotune.pruning import Pruner
from memtune.autotune.sampler import Sampler
from memtune.autotune.scoring import EVENTS_FOR, Goal, Scored, Scorer, Scores, alike, fits_budget
from memtune.technique import Reason

_ASKS = 16
"""Suggestions of the sampler that may be pruned before the ranking is used instead."""
_CLOSER = 8
"""So many of those that only look better are simulated op by op for one proposal."""
_EVERY = 3
"""Each third candidate is the sampler's: it knows what trials showed, the ranking what the simulator believes."""


@dataclass(frozen=True)
class Proposal:
    """A candidate to run; `number` is set where the sampler already made a trial of it."""

    scored: Scored
    number: int | None = None


@dataclass
class Proposer:
    """Draws candidates until none is left that could be better than what was measured.

    Attributes:
        on_pruned: Told number, candidate and reason of each suggestion that is not run.
    """

    scores: Scores
    scorer: Scorer
    sampler: Sampler
    goal: Goal
    on_pruned: Callable[[int, Scored, str], None]
    _turn: int = field(default=0)

    def next(self, pruner: Pruner, tried: Collection[str], best: float | None, effects: Effects) -> Proposal | None:
        """The next candidate, or None when the space is exhausted or no improvement on `best` is predicted.

        Args:
            pruner: With the calibration that trials allow now.
            tried: Keys of candidates that ran, run or wait.
            best: Value of the best that was measured, smaller is better.
            effects: Of the techniques that ran; they order candidates, they prune none.
        """
        self._turn += 1
        if self._turn % _EVERY == 0:
            found = self._from_sampler(pruner, tried, best)
            if found is not None:
                return found
        for each in self._ranked(pruner, tried, effects):
            if self._may_improve(each, pruner, best):
                return Proposal(each)
        return None

    def _ranked(self, pruner: Pruner, tried: Collection[str], effects: Effects) -> Iterator[Scored]:
        """The best few that are not pruned; those expected to fit first, then one of each group that is alike.

        The coarse level is too hopeful, so what it puts first is looked at more closely and put where it belongs.
        """
        seen = {alike(self.scores.by_key[key].prediction) for key in tried if key in self.scores.by_key}

        def order(each: Scored) -> tuple[float, ...]:
            over = not fits_budget(each.prediction, pruner.budget_bytes, pruner.calibration)
            # Over the expected budget the one most likely to fit comes first.
            excess = float(each.prediction.peak_allocated_bytes) if over else 0.0
            rank = each.rank_among_levels(self.goal, slower=effects.of(each.choice))
            return (over, alike(each.prediction) in seen, excess, *rank)

        untried = (
            each for each in self.scores.by_key.values() if each.key not in tried and pruner.reason(each.prediction) is None
        )
        best = [(order(each), i, each) for i, each in enumerate(heapq.nsmallest(EVENTS_FOR, untried, key=order))]
        looked_at = 0
        while best:
            _, i, each = heapq.heappop(best)  # nsmallest gives them in order, which is a heap
            refined = self._refined(each)
            if pruner.reason(refined.prediction) is not None:
                continue
            if refined is not each and looked_at < _CLOSER:
                looked_at += 1
                heapq.heappush(best, (order(refined), i, refined))
                continue
            yield refined

    def _refined(self, each: Scored) -> Scored:
        refined = self.scorer.refined(each)
        self.scores.by_key[each.key] = refined
        return refined

    def _from_sampler(self, pruner: Pruner, tried: Collection[str], best: float | None) -> Proposal | None:
        for _ in range(_ASKS):
            number, choice = self.sampler.ask()
            scored = self._known(choice)
            if isinstance(scored, str):
                self.sampler.prune(number, scored)
                continue
            reason = pruner.reason(scored.prediction)
            if scored.key in tried:
                self.sampler.prune(number, "equal to a candidate that ran")
            elif reason is not None:
                self.sampler.prune(number, reason)
                self.on_pruned(number, scored, reason)
            elif not self._may_improve(scored, pruner, best):
                self.sampler.prune(number, "predicted to be no better than what was measured")
            else:
                return Proposal(scored, number)
        return None

    def _known(self, choice: Choice | None) -> Scored | str:
        if choice is None:
            return "its knobs exclude each other"
        scored = self.scorer.score(choice)
        if isinstance(scored, Reason):
            return str(scored)
        return self._refined(self.scores.by_key.get(scored.key, scored))

    def _may_improve(self, each: Scored, pruner: Pruner, best: float | None) -> bool:
        """Whether the better end of its interval beats what was measured; always so before there is data behind the interval."""
        if best is None or not pruner.calibration.is_calibrated:
            return True
        if self.goal == "memory":
            return pruner.peak_low_bytes(each.prediction) < best
        if self.goal == "batch":
            return -float(each.choice.execution.micro_batch or 0) < best
        fast = pruner.calibration.step_range()[0] * pruner.calibration.step_correction
        samples = each.prediction.samples_per_s * each.prediction.step_s
        return each.prediction.step_s * fast / samples < best
