"""What measured step times say of single techniques; proposals are ranked by it, so one surprise is not tried three times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from memtune.autotune.candidates import Choice

Kind = tuple[str, str]
"""Slot and technique."""
_PRIOR_TRIALS = 1.0
"""A technique is taken to be predicted as well as all others with the weight of so many trials."""
_FARTHEST = 4.0
"""Factors beyond this, either way, are cut."""


def kinds(choice: Choice) -> frozenset[Kind]:
    """The techniques of `choice`, whatever their knobs."""
    return frozenset((each.slot, each.kind) for each in choice.techniques)


@dataclass(frozen=True)
class Effects:
    """By technique: how many times as long steps with it take as predicted, beside what all steps have in common."""

    factors: Mapping[Kind, float] = field(default_factory=dict)

    def of(self, choice: Choice) -> float:
        """By what the predicted time of `choice` is to be multiplied; 1 where nothing is known of its techniques."""
        found = math.prod(self.factors.get(kind, 1.0) for kind in kinds(choice))
        return min(max(found, 1 / _FARTHEST), _FARTHEST)


def effects(trials: Iterable[tuple[frozenset[Kind], float]]) -> Effects:
    """Fit the logarithm of measured over predicted time by one number for all trials and one for each technique.

    Ridge regression (Hoerl, Kennard 1970, Technometrics 12, equation 2.1) with a penalty on the techniques' numbers alone, so a
    ratio that one trial of a technique showed counts half, that of three trials three quarters.

    Args:
        trials: Techniques, and measured over predicted seconds.
    """
    rows = list(trials)
    known = sorted({kind for mine, _ in rows for kind in mine})
    if len(rows) < 2 or not known:
        return Effects()
    design = np.array([[1.0, *(kind in mine for kind in known)] for mine, _ in rows])
    penalty = np.diag([1e-9, *[_PRIOR_TRIALS] * len(known)])
    found = np.linalg.solve(design.T @ design + penalty, design.T @ np.log([ratio for _, ratio in rows]))
    return Effects(dict(zip(known, np.exp(found[1:]).tolist(), strict=True)))
