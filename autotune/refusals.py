"""Which techniques refuse the live model: what trials that ended in the same refusal had in common.

Blamed are whole intersections of trials, never parts of them: of what two refused trials share, which part is to blame is not
known, and nothing that is struck out is tried again. One refusal may come from several techniques, each from two trials or more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from memtune.autotune.effects import Kind

Kinds = frozenset[Kind]


def blamed(refused: Sequence[Kinds], worked: Iterable[Kinds]) -> list[Kinds]:
    """What at least two trials with one refusal had in common, and no trial that worked had.

    What explains most trials comes first, of equals what two trials showed first; the next one must explain two of those that
    are left. So a technique that happens to stand beside two culprits is not blamed in their place once each has shown itself
    twice more.

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
