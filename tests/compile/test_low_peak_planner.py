"""Orders of ops: the best there is for small graphs, never worse than program order, every op after what it
needs.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from memtune.compile.low_peak_planner import LowPeak, Ops, low_peak_order

Rows = tuple[int, list[tuple[int, int, bool]], list[tuple[int, int]], list[tuple[int, int]]]


@st.composite
def rows(draw: st.DrawFn, most_ops: int) -> Rows:
    count = draw(st.integers(1, most_ops))
    size = st.one_of(st.integers(0, 9), st.integers(0, 10**12))
    storages = draw(st.lists(st.tuples(size, st.integers(-1, count - 1), st.booleans()), max_size=2 * count))
    uses = [
        (op, storage)
        for storage, (_, producer, _) in enumerate(storages)
        for op in draw(st.lists(st.integers(max(producer, 0), count - 1), max_size=3))
    ]
    some = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(
        lambda pair: pair[0] < pair[1]
    )
    pairs = draw(st.lists(some, max_size=3)) if count > 1 else []
    return count, storages, uses, pairs


def needed(graph: Rows) -> list[set[int]]:
    """Return by op: the ops that must run before it."""
    count, storages, uses, pairs = graph
    before: list[set[int]] = [set() for _ in range(count)]
    for op, storage in uses:
        before[op] |= {storages[storage][1]} - {-1, op}
    for first, then in pairs:
        before[then].add(first)
    return before


def peak_of(graph: Rows, order: list[int]) -> int:
    """Return the peak of live bytes, computed op by op and storage by storage."""
    _, storages, uses, _ = graph
    at = {op: place for place, op in enumerate(order)}
    live = [0] * len(order)
    for storage, (n_bytes, producer, outlives) in enumerate(storages):
        users = [at[op] for op, used in uses if used == storage] + ([at[producer]] if producer >= 0 else [])
        begins = at[producer] if producer >= 0 else 0
        ends = len(order) - 1 if outlives or not users else max(users)
        for place in range(begins, ends + 1):
            live[place] += n_bytes
    return max(live)


def best_peak(graph: Rows) -> int:
    """Return the least peak over all orders, by trying all.

    What comes after a set of ops depends on the set alone.
    """
    count, storages, uses, _ = graph
    before = needed(graph)
    users = [
        {op for op, used in uses if used == storage} | ({each[1]} - {-1})
        for storage, each in enumerate(storages)
    ]

    def live(done: frozenset[int], running: int) -> int:
        there = 0
        for (n_bytes, producer, outlives), mine in zip(storages, users, strict=True):
            made = producer < 0 or producer in done or producer == running
            there += n_bytes if made and (outlives or not mine or mine - done) else 0
        return there

    @cache
    def least(done: frozenset[int]) -> int:
        ready = [op for op in range(count) if op not in done and before[op] <= done]
        return min((max(live(done, op), least(done | {op})) for op in ready), default=0)

    return least(frozenset())


def checked(graph: Rows) -> LowPeak:
    """Return the planner's order after checks that hold for every order."""
    found = low_peak_order(Ops.of(*graph))
    order = found.order.tolist()
    assert sorted(order) == list(range(graph[0]))
    at = {op: place for place, op in enumerate(order)}
    assert all(at[other] < at[op] for op, others in enumerate(needed(graph)) for other in others)
    assert found.peak_bytes == peak_of(graph, order)
    assert found.program_peak_bytes == peak_of(graph, list(range(graph[0])))
    assert found.peak_bytes <= found.program_peak_bytes
    return found


@settings(max_examples=60, deadline=None)
@given(rows(most_ops=8))
def test_low_peak_order_is_optimal_for_small_graphs(graph: Rows) -> None:
    assert checked(graph).peak_bytes == best_peak(graph)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(rows(most_ops=12))
def test_low_peak_order_is_optimal_for_twelve_ops(graph: Rows) -> None:
    assert checked(graph).peak_bytes == best_peak(graph)


@settings(max_examples=60, deadline=None)
@given(rows(most_ops=60))
def test_low_peak_order_is_never_above_program_order(graph: Rows) -> None:
    checked(graph)


def updates_at_the_end(layers: int) -> Rows:
    """Backward of `layers` equal layers, then each one's update in three ops.

    A copy, an op on it, the write that ends both.
    """
    storages = [(1, -1, True)]
    uses: list[tuple[int, int]] = []
    for layer in range(layers):
        storages.append((100, layer, False))  # its gradient
    for layer in range(layers):
        op = layers + 3 * layer
        storages.append((100, op, False))
        uses += [
            (op, 1 + layer),
            (op + 1, len(storages) - 1),
            (op + 2, len(storages) - 1),
            (op + 2, 1 + layer),
        ]
    pairs = [(layer, layer + 1) for layer in range(layers - 1)]
    pairs += [
        (layers + 3 * layer + i, layers + 3 * layer + i + 1) for layer in range(layers) for i in range(2)
    ]
    return 4 * layers, storages, uses, pairs


def test_low_peak_order_moves_updates_to_their_gradients() -> None:
    """ROAM's weight updates: an update's ops first raise live bytes, and still move together."""
    found = checked(updates_at_the_end(200))
    assert found.program_peak_bytes == 200 * 100 + 100 + 1
    assert found.peak_bytes == 201


def test_low_peak_order_handles_ten_thousand_ops() -> None:
    rng = np.random.default_rng(0)
    count = 10_000
    storages = [(int(size), op, False) for op, size in enumerate(rng.integers(1, 1 << 20, count))]
    near = np.minimum(np.arange(count)[:, None] + rng.geometric(0.02, (count, 3)), count - 1)
    uses = [(int(user), storage) for storage, users in enumerate(near) for user in users]
    found = low_peak_order(Ops.of(count, storages, uses))
    assert sorted(found.order.tolist()) == list(range(count))
    assert found.peak_bytes < found.program_peak_bytes


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        ((2, [(1, 2, False)], [], []), "made by no op"),
        ((2, [(1, 1, False)], [(0, 0)], []), "before it is made"),
        ((2, [(1, 0, False)], [(0, 1)], []), "no op or storage"),
        ((2, [(-1, 0, False)], [], []), "fewer than no bytes"),
        ((2, [], [], [(1, 1)]), "later in program order"),
    ],
)
def test_low_peak_order_rejects_invalid_graph(graph: Rows, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        low_peak_order(Ops.of(*graph))
