"""Residency plans of windows and caches; eviction rules are compared with brute force."""

from __future__ import annotations

import functools
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings, strategies as st

from memtune.program.residency import (
    Residency,
    Rule,
    cache_residency,
    lru_moves,
    order_of_use,
    smallest_window,
    window_residency,
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
    """Used units are resident, never more than the slots, and none at the end."""
    resident = residency.resident()
    assert all(now.issuperset(use) for use, now in zip(uses, resident[:-1], strict=True))
    assert all(len(now) <= room for now, room in zip(resident[:-1], slots, strict=True))
    assert not resident[-1]
    before: frozenset[int] = frozenset()
    for drops, loads, now in zip(residency.drops, residency.loads, resident, strict=True):
        assert set(drops) <= before
        assert not set(loads) & (before - set(drops))
        before = now


@given(st.integers(1, 9).flatmap(lambda units: st.tuples(st.just(units), st.integers(1, units))))
@settings(deadline=None, max_examples=40)
def test_window_loads_each_unit_once_per_direction_except_at_the_end(sizes: tuple[int, int]) -> None:
    units, slots = sizes
    residency = window_residency(units, slots)
    check(residency, alone(order_of_use(units)), (slots,) * 2 * units)
    assert residency.moves == 2 * units - slots
    for at, loads in enumerate(residency.loads[1 : units - slots + 1], 1):
        assert loads == (at + slots - 1,)


@pytest.mark.parametrize("slots", [0, 4])
def test_window_rejects_invalid_slots(slots: int) -> None:
    with pytest.raises(ValueError, match="1 to 3"):
        window_residency(3, slots)


@given(MOMENTS)
@settings(deadline=None, max_examples=60)
def test_belady_has_fewest_loads(moments: list[tuple[frozenset[int], int]]) -> None:
    uses = tuple(tuple(sorted(units)) for units, _ in moments)
    slots = tuple(len(units) + spare for units, spare in moments)
    found = {rule: cache_residency(uses, slots, rule) for rule in ("belady", "lru", "lfu")}
    for residency in found.values():
        check(residency, uses, slots)
    assert found["belady"].moves == fewest_moves(uses, slots)
    assert found["belady"].moves <= min(found["lru"].moves, found["lfu"].moves)


def fewest_moves(uses: tuple[tuple[int, ...], ...], slots: tuple[int, ...]) -> int:
    """Return the fewest loads, by trying all sets of units to keep at each moment."""

    @functools.cache
    def rest(at: int, resident: frozenset[int]) -> int:
        if at == len(uses):
            return 0
        others, room = resident.difference(uses[at]), slots[at] - len(uses[at])
        kept = combinations(sorted(others), min(room, len(others)))
        return len(set(uses[at]) - resident) + min(
            rest(at + 1, frozenset(each).union(uses[at])) for each in kept
        )

    return rest(0, frozenset())


def test_lru_equals_belady_forth_and_back_but_fails_in_a_loop() -> None:
    """When the direction reverses, the last units are used first, and LRU keeps them, as Belady does."""

    def moves(uses: tuple[int, ...], slots: int, rule: Rule) -> int:
        return cache_residency(alone(uses), (slots,) * len(uses), rule).moves

    forth_and_back, loop = order_of_use(6), tuple(range(4)) * 3
    assert moves(forth_and_back, 3, "lru") == moves(forth_and_back, 3, "belady") == 9
    assert moves(loop, 3, "lru") == 12
    assert moves(loop, 3, "belady") == 6
    assert moves((0, 0, 0, 1, 2, 0), 2, "lfu") == 3


def test_cache_rejects_moment_with_more_units_than_slots() -> None:
    with pytest.raises(ValueError, match="uses 2 units and has 1"):
        cache_residency(((0, 1),), (1,), "lru")


@given(st.lists(st.tuples(st.floats(0.1, 3), st.floats(0.1, 3), st.floats(0.1, 9)), min_size=2, max_size=7))
@settings(deadline=None, max_examples=60)
def test_smallest_window_hides_all_loads(
    times: list[tuple[float, float, float]],
) -> None:
    forward, backward, load = (list(column) for column in zip(*times, strict=True))
    compute = forward + backward[::-1]
    fitting = [slots for slots in range(2, len(load)) if not waits(compute, load, slots)]
    assert smallest_window(compute, load) == min([*fitting, len(load)])


def waits(compute: list[float], load: list[float], slots: int) -> bool:
    """Return whether a load with `slots` slots ends after its unit is first needed."""
    units = len(load)
    starts = [sum(compute[:at]) for at in range(2 * units + 1)]
    uses = order_of_use(units)
    for at, loads in enumerate(window_residency(units, slots).loads):
        for unit in loads:
            used = next(i for i in range(at, 2 * units) if uses[i] == unit)
            if at and starts[at] + load[unit] > starts[used] + 1e-12:
                return True
    return False


def test_smallest_window_grows_with_load_time() -> None:
    widths = [smallest_window([1.0] * 16, [load] * 8) for load in (0.5, 1.5, 3.0, 100.0)]
    assert widths == sorted(widths)
    assert widths[0] == 2
    assert widths[-1] == 8
    assert all(one < other for one, other in pairwise(widths))


@given(MOMENTS)
@settings(deadline=None, max_examples=60)
def test_lru_moves_equal_cache_residency_for_all_slots(moments: list[tuple[frozenset[int], int]]) -> None:
    uses = tuple(tuple(sorted(units)) for units, _ in moments)
    least, units = max(map(len, uses)), len(frozenset().union(*uses))
    found = lru_moves(uses)
    assert [found[n] for n in range(least, units + 1)] == [
        cache_residency(uses, (n,) * len(uses), "lru").moves for n in range(least, units + 1)
    ]
