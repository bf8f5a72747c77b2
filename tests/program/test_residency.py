"""Which units are where when: windows, caches, and rules that are held against brute force."""

from __future__ import annotations

import functools
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtune.program.residency import (
    Residency,
    Rule,
    cached,
    lru_moves,
    order_of_use,
    smallest_window,
    window,
)

MOMENTS = st.lists(
    st.tuples(st.frozensets(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 3)),
    min_size=1,
    max_size=9,
)


def alone(uses: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Moments that use one unit each."""
    return tuple((use,) for use in uses)


def check(residency: Residency, uses: tuple[tuple[int, ...], ...], slots: tuple[int, ...]) -> None:
    """All units are there when they are used, never more than the slots, and none is left at the end."""
    there = residency.resident()
    assert all(now.issuperset(use) for use, now in zip(uses, there[:-1], strict=True))
    assert all(len(now) <= room for now, room in zip(there[:-1], slots, strict=True))
    assert not there[-1]
    before: frozenset[int] = frozenset()
    for drops, loads, now in zip(residency.drops, residency.loads, there, strict=True):
        assert set(drops) <= before
        assert not set(loads) & (before - set(drops))
        before = now


@given(st.integers(1, 9).flatmap(lambda units: st.tuples(st.just(units), st.integers(1, units))))
@settings(deadline=None, max_examples=40)
def test_a_window_brings_each_unit_in_once_a_pass_but_for_those_at_the_turn(sizes: tuple[int, int]) -> None:
    units, slots = sizes
    residency = window(units, slots)
    check(residency, alone(order_of_use(units)), (slots,) * 2 * units)
    assert residency.moves == 2 * units - slots
    for at, loads in enumerate(residency.loads[1 : units - slots + 1], 1):
        assert loads == (at + slots - 1,)


@pytest.mark.parametrize("slots", [0, 4])
def test_a_window_has_room_for_one_and_at_most_all(slots: int) -> None:
    with pytest.raises(ValueError, match="1 to 3"):
        window(3, slots)


@given(MOMENTS)
@settings(deadline=None, max_examples=60)
def test_belady_moves_least(moments: list[tuple[frozenset[int], int]]) -> None:
    """Whatever number of units a moment uses, and whatever room it leaves."""
    uses = tuple(tuple(sorted(units)) for units, _ in moments)
    slots = tuple(len(units) + spare for units, spare in moments)
    found = {rule: cached(uses, slots, rule) for rule in ("belady", "lru", "lfu")}
    for residency in found.values():
        check(residency, uses, slots)
    assert found["belady"].moves == fewest_moves(uses, slots)
    assert found["belady"].moves <= min(found["lru"].moves, found["lfu"].moves)


def fewest_moves(uses: tuple[tuple[int, ...], ...], slots: tuple[int, ...]) -> int:
    """Whatever stays at each moment, tried."""

    @functools.cache
    def rest(at: int, there: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        others, room = there.difference(uses[at]), slots[at] - len(uses[at])
        kept = combinations(sorted(others), min(room, len(others)))
        return len(set(uses[at]) - there) + min(
            rest(at + 1, frozenset(each).union(uses[at])) for each in kept
        )

    return rest(0, frozenset())


def test_rules_differ_on_a_pass_there_and_back() -> None:
    """At the turn the last units are used again first: LRU keeps them, and so does Belady; a loop is where
    LRU fails.
    """

    def moves(uses: tuple[int, ...], slots: int, rule: Rule) -> int:
        return cached(alone(uses), (slots,) * len(uses), rule).moves

    there_and_back, loop = order_of_use(6), tuple(range(4)) * 3
    assert moves(there_and_back, 3, "lru") == moves(there_and_back, 3, "belady") == 9
    assert moves(loop, 3, "lru") == 12
    assert moves(loop, 3, "belady") == 6
    assert moves((0, 0, 0, 1, 2, 0), 2, "lfu") == 3


def test_a_moment_without_room_for_what_it_uses_is_refused() -> None:
    with pytest.raises(ValueError, match="uses 2 units and has 1"):
        cached(((0, 1),), (1,), "lru")


@given(st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.1, 9)), min_size=2, max_size=7))
@settings(deadline=None, max_examples=60)
def test_the_solved_window_is_the_smallest_under_which_nothing_is_waited_for(
    times: list[tuple[float, float, float]],
) -> None:
    forward, backward, load = (list(column) for column in zip(*times, strict=True))
    compute = forward + backward[::-1]
    fitting = [slots for slots in range(2, len(load)) if not waits(compute, load, slots)]
    assert smallest_window(compute, load) == min([*fitting, len(load)])


def waits(compute: list[float], load: list[float], slots: int) -> bool:
    """Walk the moments by the clock: what comes in with a moment must be there, before its use, with no time
    lost.
    """
    units = len(load)
    starts = [sum(compute[:at]) for at in range(2 * units + 1)]
    uses = order_of_use(units)
    for at, loads in enumerate(window(units, slots).loads):
        for unit in loads:
            used = next(i for i in range(at, 2 * units) if uses[i] == unit)
            if at and starts[at] + load[unit] > starts[used] + 1e-12:
                return True
    return False


def test_slower_links_need_wider_windows() -> None:
    widths = [smallest_window([1.0] * 16, [load] * 8) for load in (0.5, 1.5, 3.0, 100.0)]
    assert widths == sorted(widths)
    assert widths[0] == 2
    assert widths[-1] == 8
    assert all(one < other for one, other in pairwise(widths))


@given(MOMENTS)
@settings(deadline=None, max_examples=60)
def test_moves_under_lru_are_told_for_all_slots_at_once(moments: list[tuple[frozenset[int], int]]) -> None:
    uses = tuple(tuple(sorted(units)) for units, _ in moments)
    least, units = max(map(len, uses)), len(frozenset().union(*uses))
    found = lru_moves(uses)
    assert [found[n] for n in range(least, units + 1)] == [
        cached(uses, (n,) * len(uses), "lru").moves for n in range(least, units + 1)
    ]
