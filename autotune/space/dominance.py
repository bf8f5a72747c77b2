"""Settings of techniques that free what a budget requires, without those that another one surely beats.

Such a technique solves, for each setting of the other slots, what to free, in seconds for large models. Of
two settings that differ only in knobs of other slots, the one whose step *without* the technique takes no
more time and no more memory (within 1 %) has to free no more, so it is no slower with it. The other is
*dominated*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field

from memtune.autotune.predict import Prediction
from memtune.autotune.space.candidates import Choice

_LESS = 0.99
"""A slower setting is solved only if it needs less than this part of the bytes of the faster ones: a smaller
difference saves next to no recomputation.
"""


@dataclass(frozen=True)
class Budgeted:
    """A choice with techniques by budget, and the same choice without them."""

    choice: Choice
    without: Choice

    @property
    def group(self) -> Hashable:
        """Return what settings share that differ only in knobs of other slots."""
        spends = tuple(each for each in self.choice.techniques if each.by_budget)
        return (
            self.choice.execution,
            spends,
            tuple((each.slot, each.kind) for each in self.without.techniques),
        )


@dataclass
class _Group:
    """The settings of one group that were asked for, with the prediction without the technique."""

    predictions: dict[Choice, Prediction] = field(default_factory=dict)

    def front(self) -> list[Choice]:
        """Return the settings that none dominates; of equals the simplest."""
        ordered = sorted(
            self.predictions.items(),
            key=lambda each: (each[1].step_s, each[1].peak_allocated_bytes, each[0].complexity),
        )
        found, least = list[Choice](), float("inf")
        for choice, prediction in ordered:
            if prediction.peak_allocated_bytes < _LESS * least:
                least = prediction.peak_allocated_bytes
                found.append(choice)
        return found


class Dominance:
    """Decides which settings of techniques by budget are worth solving.

    Args:
        optional_slots: Slots that may hold no technique in this space; elsewhere every setting is solved.
    """

    def __init__(self, optional_slots: Collection[str]) -> None:
        self._optional = frozenset(optional_slots)
        self._groups: dict[Hashable, _Group] = defaultdict(_Group)

    def budgeted(self, choice: Choice) -> Budgeted | None:
        """Return `choice` with its form without techniques by budget; None if it has none of them."""
        spends = [each for each in choice.techniques if each.by_budget]
        if not spends or not all(each.slot in self._optional for each in spends):
            return None
        rest = tuple(each for each in choice.techniques if not each.by_budget)
        return Budgeted(choice, Choice(choice.execution, rest))

    def add(self, asked: Budgeted, without: Prediction) -> None:
        """Add a setting, with the prediction of its form without the technique."""
        self._groups[asked.group].predictions[asked.choice] = without

    def refuse(self, asked: Budgeted) -> None:
        """Remove a setting that does not fit, which dominates none."""
        self._groups[asked.group].predictions.pop(asked.choice, None)

    def undominated(self, asked: Iterable[Budgeted]) -> set[Choice]:
        """Return the choices that no other one dominates, in the groups of `asked`."""
        groups = {each.group: self._groups[each.group] for each in asked}
        return {choice for group in groups.values() for choice in group.front()}
