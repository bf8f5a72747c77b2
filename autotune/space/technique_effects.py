"""Correct step times by technique, from trials.

Proposals are ranked by it, so one misprediction is not tried three times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from memtune.autotune.space.candidates import Choice

Kind = tuple[str, str]
"""Slot and technique."""
_PRIOR_TRIALS = 1.0
"""Weight of the prior that a technique is predicted as well as all others, in trials."""
_LARGEST_FACTOR = 4.0
"""Limit of the factors, in either direction."""


def kinds(choice: Choice) -> frozenset[Kind]:
    """Return the techniques of `choice` without their knobs."""
    return frozenset((each.slot, each.kind) for each in choice.techniques)


@dataclass(frozen=True)
class Effects:
    """Factor of measured over predicted step time by technique, relative to that of all steps."""

    factors: Mapping[Kind, float] = field(default_factory=dict)

    def of(self, choice: Choice) -> float:
        """Return the factor on the predicted time of `choice`; 1 if its techniques are unknown."""
        found = math.prod(self.factors.get(kind, 1.0) for kind in kinds(choice))
        return min(max(found, 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)


def effects(trials: Iterable[tuple[frozenset[Kind], float]]) -> Effects:
    """Fit log(measured / predicted time) by one term for all trials and one for each technique.

    Ridge regression (Hoerl, Kennard 1970, Technometrics 12, equation 2.1) that penalises only the techniques'
    terms: a ratio seen in one trial of a technique counts half, in three trials three quarters.

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


# Which techniques refuse the live model: what trials that ended in the same refusal had in common.
Kinds = frozenset[Kind]


def refusing_techniques(refused: Sequence[Kinds], worked: Iterable[Kinds]) -> list[Kinds]:
    """Return the techniques common to at least two trials with one refusal, and to no trial that worked.

    The set that explains most trials comes first, of equals the one seen first; the next one must explain two
    of the remaining trials. So a technique that occurs together with two culprits is not blamed for them once
    each has been seen twice more.

    Args:
        refused: Techniques of each trial with that refusal, in order.
        worked: Those of each trial that ran to its end.
    """
    known, left, found = set(worked), list(refused), list[Kinds]()
    while True:
        shared = dict.fromkeys(one & other for one, other in combinations(left, 2))
        candidates = [each for each in shared if each and not any(each <= those for those in known)]
        if not candidates:
            return found
        best = max(candidates, key=lambda each: sum(each <= trial for trial in left))
        found.append(best)
        left = [trial for trial in left if not best <= trial]
