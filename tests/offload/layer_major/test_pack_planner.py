"""Packs of blocks against brute force."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from memtune.offload.layer_major.pack_planner import balanced, greedy
from memtune.offload.layer_major.packs import Packs, spans


def test_balanced_packs_minimize_the_largest() -> None:
    draw = random.Random(3)
    for _ in range(100):
        n_bytes = [draw.randrange(1, 30) for _ in range(draw.randrange(1, 9))]
        count = draw.randrange(1, len(n_bytes) + 1)
        cuts = [(0, *inner, len(n_bytes)) for inner in combinations(range(1, len(n_bytes)), count - 1)]
        best = min(max(sum(n_bytes[a:b]) for a, b in pairwise(each)) for each in cuts)
        found = balanced(n_bytes, count)
        assert len(found) == count
        assert max(sum(n_bytes[slice(*each)]) for each in found) == best
    with pytest.raises(ValueError, match="cannot form 3 packs"):
        balanced([1, 1], 3)


def test_greedy_packs_are_filled_from_the_last_block() -> None:
    assert greedy([2, 2, 2, 2, 2], 4) == ((0, 1), (1, 3), (3, 5))
    assert greedy([9, 1, 1], 4) == ((0, 1), (1, 3))


def test_packs_refuse_spans_that_form_no_chain() -> None:
    good = Packs(spans([2]), spans([1, 1, 2]))
    assert good.uses == ((0, 2), (2, 4), (1, 2), (0, 1))
    assert good.groups(3) == (range(3),)
    assert Packs((), spans([4]), group=2).groups(3) == (range(2), range(2, 3))
    for forward, backward in ((spans([1]), spans([2, 2])), ((), ()), ((), ((1, 2),)), ((), ((0, 2), (1, 3)))):
        with pytest.raises(ValueError, match="do not follow"):
            Packs(forward, backward)
