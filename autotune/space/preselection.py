"""Decide which settings are scored at all: four rules leave out those that cannot be chosen.

1. Layer-major order of long steps: its program has the ops of all micro-batches.
2. A micro-batch above one that needs far more than the budget, with all other settings equal.
3. A technique by budget (`Technique.by_budget`) where the step fits without it, or is much slower than the
   best even without it. Such a technique solves, for each setting of the other slots, what to free: seconds
   for large models.
4. The same technique where another setting *dominates*: of two that differ only in knobs of other slots, the
   one whose step without the technique takes no more time and no more memory (within 1 %) has to free no
   more, so it is no slower with it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from memtune.autotune.predict import Prediction
from memtune.autotune.space.candidates import Choice

_MOST_LAYER_MAJOR = 32
"""Micro-batches that layer-major order is tried with: weights that move once for 32 cost little."""
_TOO_LONG = (
    f"layer-major order is tried with up to {_MOST_LAYER_MAJOR} micro-batches a step (a larger micro_batch)"
)
_SURELY_OVER = 2.0
"""A setting is not scored if with a smaller micro-batch it needs more than this part of the budget. A larger
one needs no less, but for the gradients, which a step of one micro-batch may free early: at most half.
"""
_SLOWER_WITHOUT = 1.1
"""A setting by budget is not solved if it is slower than the best by this factor without it."""
_LESS = 0.99
"""A slower setting is solved only if it needs less than this part of the bytes of the faster ones."""


@dataclass(frozen=True)
class Budgeted:
    """A choice with techniques by budget, and the same choice without them."""

    choice: Choice
    without: Choice
    group: Hashable
    """Equal for settings that differ only in knobs of other slots."""


class Preselection:
    """Chooses the settings that are worth a score, by the predictions so far.

    Args:
        budget_bytes: Device bytes per rank; None for no limit.
        for_speed: Whether the fastest setting is searched; else settings that are slow are solved too.
        optional_slots: Slots that may hold no technique in this space; elsewhere every setting is solved.
    """

    def __init__(self, budget_bytes: int | None, *, for_speed: bool, optional_slots: Collection[str]) -> None:
        self._budget_bytes, self._for_speed = budget_bytes, for_speed
        self._optional = frozenset(optional_slots)
        self._known: dict[Choice, Prediction] = {}
        self._over_from: dict[Hashable, int] = {}
        """Smallest micro-batch that is surely over the budget, by the other settings."""
        self._groups: dict[Hashable, dict[Choice, Prediction]] = defaultdict(dict)
        """Settings by budget, each with its prediction without the technique."""

    def refusal(self, choice: Choice) -> str | None:
        """Return why `choice` is not tried, whatever is known (rule 1)."""
        is_long = choice.execution.accumulate > _MOST_LAYER_MAJOR
        layer_major = is_long and any(each.effects.layer_major for each in choice.techniques)
        return _TOO_LONG if layer_major else None

    def budgeted(self, choice: Choice) -> Budgeted | None:
        """Return `choice` with its form without techniques by budget; None if it has none of them."""
        # A slot that must hold a technique has no form without it to compare with.
        spends = tuple(each for each in choice.techniques if each.by_budget)
        if not spends or not all(each.slot in self._optional for each in spends):
            return None
        rest = tuple(each for each in choice.techniques if not each.by_budget)
        kinds = tuple((each.slot, each.kind) for each in rest)
        return Budgeted(choice, Choice(choice.execution, rest), (choice.execution, spends, kinds))

    def add(self, choice: Choice, prediction: Prediction) -> None:
        """Add the prediction of a choice that no technique refuses."""
        self._known[choice] = prediction
        budget = self._budget_bytes
        if budget is not None and prediction.peak_allocated_bytes > _SURELY_OVER * budget:
            key = _but_size(choice)
            self._over_from[key] = min(size_of(choice), self._over_from.get(key, size_of(choice)))

    def is_surely_over(self, choice: Choice) -> bool:
        """Return whether a smaller micro-batch already needs far more than the budget (rule 2)."""
        return size_of(choice) > self._over_from.get(_but_size(choice), math.inf)

    def fits(self, n_bytes: int) -> bool:
        """Return whether a device may hold `n_bytes`."""
        return self._budget_bytes is None or n_bytes <= self._budget_bytes

    def request(self, budgeted: Iterable[Budgeted]) -> None:
        """Add settings by budget, whose forms without the technique have been scored."""
        for each in budgeted:
            if (without := self._known.get(each.without)) is not None:
                self._groups[each.group][each.choice] = without

    def solved(self, budgeted: Budgeted) -> None:
        """Note that a setting by budget was solved; one that a technique refused dominates none."""
        if budgeted.choice not in self._known:
            self._groups[budgeted.group].pop(budgeted.choice, None)

    def worth_solving(self, waiting: Iterable[Budgeted]) -> list[Choice]:
        """Return the settings by budget to solve now (rules 3 and 4)."""
        waiting = list(waiting)
        undominated = {choice for group in {each.group for each in waiting} for choice in self._front(group)}
        # Only what fits can be chosen, so nothing else makes a setting too slow.
        fitting = (each for each in self._known.values() if self.fits(each.peak_allocated_bytes))
        fastest = max((each.samples_per_s for each in fitting), default=0.0) if self._for_speed else 0.0
        return [
            each.choice
            for each in waiting
            # Without a prediction of the form without the technique nothing speaks against solving it.
            if (without := self._known.get(each.without)) is None
            or (
                each.choice in undominated
                and not self.fits(without.peak_allocated_bytes)
                and without.samples_per_s >= fastest / _SLOWER_WITHOUT
            )
        ]

    def _front(self, group: Hashable) -> list[Choice]:
        """Return the settings of a group that none dominates; of equals the simplest."""
        ordered = sorted(
            self._groups[group].items(),
            key=lambda each: (each[1].step_s, each[1].peak_allocated_bytes, each[0].complexity),
        )
        found, least = list[Choice](), math.inf
        for choice, without in ordered:
            if without.peak_allocated_bytes < _LESS * least:
                least = without.peak_allocated_bytes
                found.append(choice)
        return found


def size_of(choice: Choice) -> int:
    """Return the micro-batch, 1 if none is given."""
    return choice.execution.micro_batch or 1


def _but_size(choice: Choice) -> Hashable:
    """Return all of `choice` but its micro-batch."""
    execution = choice.execution
    return execution.compile, execution.compile_backend, execution.autocast_cache, choice.techniques
