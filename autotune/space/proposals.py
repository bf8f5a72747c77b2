"""Propose the next candidate.

Two of three from the simulator's ranking, one of three from Optuna, none twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.pruning import Pruner
from memtune.autotune.space.sampler import Sampler
from memtune.autotune.space.scoring import EVENTS_FOR, Goal, Scored, Scorer, Scores, alike, fits_budget
from memtune.autotune.space.technique_effects import Effects
from memtune.technique import Reason

_ASKS = 16
"""Suggestions of the sampler that may be pruned before the ranking is used instead."""
_MOST_REFINED = 8
"""Coarse candidates that are simulated op by op for one proposal."""
_SAMPLER_EVERY = 3
"""Every third candidate is the sampler's: it learns from trials, the ranking from the simulator."""


@dataclass(frozen=True)
class Proposal:
    """A candidate to run; `number` is set if the sampler already started a trial of it."""

    scored: Scored
    number: int | None = None


@dataclass
class Proposer:
    """Proposes candidates until none is left that may beat the best measurement.

    Attributes:
        on_pruned: Called with number, candidate and reason of each suggestion that is not run.
    """

    scores: Scores
    scorer: Scorer
    sampler: Sampler
    goal: Goal
    on_pruned: Callable[[int, Scored, str], None]
    _n_proposed: int = field(default=0)

    def next(
        self, pruner: Pruner, tried: Collection[str], best: float | None, effects: Effects
    ) -> Proposal | None:
        """Return the next candidate, or None if no untried one is predicted to improve on `best`.

        Args:
            pruner: With the current calibration.
            tried: Keys of candidates that ran, are running or are queued.
            best: Best measured value, smaller is better.
            effects: Of the techniques that ran; they order candidates and prune none.
        """
        self._n_proposed += 1
        if self._n_proposed % _SAMPLER_EVERY == 0:
            found = self._from_sampler(pruner, tried, best)
            if found is not None:
                return found
        for each in self._ranked(pruner, tried, effects):
            if self._may_improve(each, pruner, best):
                return Proposal(each)
        return None

    def _ranked(self, pruner: Pruner, tried: Collection[str], effects: Effects) -> Iterator[Scored]:
        """Yield the best few that are not pruned: first those expected to fit, then one of each group of
        equals.

        The coarse level is optimistic, so its best are simulated op by op and ranked again.
        """
        seen = {alike(self.scores.by_key[key].prediction) for key in tried if key in self.scores.by_key}

        def order(each: Scored) -> tuple[float, ...]:
            over = not fits_budget(each.prediction, pruner.budget_bytes, pruner.calibration)
            # Over the expected budget the one most likely to fit comes first.
            excess = float(each.prediction.peak_allocated_bytes) if over else 0.0
            rank = each.rank_among_levels(self.goal, slower=effects.of(each.choice))
            return (over, alike(each.prediction) in seen, excess, *rank)

        untried = (
            each
            for each in self.scores.by_key.values()
            if each.key not in tried and pruner.reason(each.prediction) is None
        )
        best = [
            (order(each), i, each) for i, each in enumerate(heapq.nsmallest(EVENTS_FOR, untried, key=order))
        ]
        looked_at = 0
        while best:
            _, i, each = heapq.heappop(best)  # nsmallest gives them in order, which is a heap
            refined = self._refined(each)
            if pruner.reason(refined.prediction) is not None:
                continue
            if refined is not each and looked_at < _MOST_REFINED:
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
        """Return whether the better end of its interval beats `best`; always true before calibration."""
        if best is None or not pruner.calibration.is_calibrated:
            return True
        if self.goal == "memory":
            return pruner.peak_low_bytes(each.prediction) < best
        if self.goal == "batch":
            return -float(each.choice.execution.micro_batch or 0) < best
        fast = pruner.calibration.step_range()[0] * pruner.calibration.step_correction
        samples = each.prediction.samples_per_s * each.prediction.step_s
        return each.prediction.step_s * fast / samples < best
