"""Find the techniques that refuse the live model: those that trials with the same refusal have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from memtune.autotune.space.step_time_model import Kind

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
