"""Values freed after forward are recomputed once, as late as possible, and correct; the cheapest per byte
comes first.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from memtune.program.op_schedule import Action, OpGraph, Schedule, find_schedule_error
from memtune.search_spaces.recompute._schedule_planner.schedule_search import FreeAfterForwardPlanner


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    """Graphs with forward and backward ops, several outputs, writes and ops that run once."""
    n_forward, n_back = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    makes: list[tuple[int, ...]] = []
    reads: list[tuple[int, ...]] = []
    writes: list[tuple[int, ...]] = []
    n_values = 0
    for _ in range(n_forward + n_back):
        some = st.lists(st.integers(0, n_values - 1), unique=True, max_size=3) if n_values else st.just([])
        reads.append(tuple(sorted(draw(some))))
        writes.append(reads[-1][:1] if draw(st.integers(0, 5)) == 0 else ())
        count = 0 if writes[-1] else draw(st.integers(1, 2))
        makes.append(tuple(range(n_values, n_values + count)))
        n_values += count
    n_ops = n_forward + n_back
    once = frozenset(op for op in range(n_ops) if draw(st.integers(0, 5)) == 0)
    return OpGraph(
        tuple(f"op{op}" for op in range(n_ops)),
        n_forward,
        tuple(makes),
        tuple(reads),
        tuple(writes),
        once=once,
    )


def planner_of(graph: OpGraph, n_bytes: list[int], op_s: list[float]) -> FreeAfterForwardPlanner:
    never, no_block = np.full(len(n_bytes), -1, np.int32), np.full(graph.n_ops, -1, np.int32)
    return FreeAfterForwardPlanner(graph, np.asarray(n_bytes), np.asarray(op_s), never, no_block)


@settings(max_examples=200, deadline=None)
@given(graph=graphs(), data=st.data())
def test_schedule_is_valid_for_any_freed_subset(graph: OpGraph, data: st.DataObject) -> None:
    """The schedule is valid, runs nothing a third time, and recomputes just before the read."""
    n_values = len(graph.maker)
    planner = planner_of(
        graph, [1 + value % 3 for value in range(n_values)], [1.0 + op % 4 for op in range(graph.n_ops)]
    )
    order = planner.order()
    assert sorted(order) == planner.candidates
    gone = set(data.draw(st.lists(st.sampled_from(order), unique=True))) if order else set()
    schedule = planner.schedule(gone)
    assert find_schedule_error(graph, schedule) == ""
    times = np.bincount(schedule.computes(), minlength=graph.n_ops)
    assert times.max() <= 2
    assert all(times[graph.maker[value]] == 2 for value in gone)
    assert gone or times.max() == 1
    for at, step in enumerate(
        schedule.backward
    ):  # not earlier: the next first run of backward needs it, or a recomputation before that does
        if step.action == Action.COMPUTE and step.target < graph.n_forward:
            computes = [each.target for each in schedule.backward[at + 1 :] if each.action == Action.COMPUTE]
            until = next(i for i, op in enumerate(computes) if op >= graph.n_forward)
            assert any(set(graph.makes[step.target]) & set(graph.reads[op]) for op in computes[: until + 1])


def test_order_is_by_price_per_byte_with_shared_runs_paid_once() -> None:
    """c needs an expensive run of a; once b has caused that run, c is nearly free and comes before d."""
    names = ("a", "b", "c", "d", "back")
    graph = OpGraph(names, 4, ((0,), (1,), (2,), (3,), (4,)), ((), (0,), (0,), (), (1, 2, 3)), ((),) * 5)
    planner = planner_of(graph, [8, 8, 4, 8, 1], [40.0, 1.0, 1.0, 48.0, 1.0])
    assert planner.candidates == [1, 2, 3]
    assert planner.order() == [1, 2, 3]  # (40 + 1) / 8, then 1 / 4 and not 41 / 4, then 48 / 8
    assert planner_of(graph, [8, 8, 4, 8, 1], [40.0, 1.0, 1.0, 8.0, 1.0]).order() == [3, 1, 2]
    assert planner.schedule({1, 2}).computes() == [0, 1, 2, 3, 0, 1, 2, 4]
    assert planner.schedule({3}).computes() == [0, 1, 2, 3, 3, 4]


def test_order_without_block_outputs_keeps_second_runs_separate() -> None:
    """With the outputs of eight blocks kept, no second run waits for another block's: few values are resident
    at once.
    """
    n_blocks, each = 8, 4
    n = n_blocks * each
    reads = [(op - 1,) if op else () for op in range(n)] + [(op,) for op in reversed(range(n))]
    makes = [(op,) for op in range(n)] + [()] * n
    graph = OpGraph(tuple(f"op{op}" for op in range(2 * n)), n, tuple(makes), tuple(reads), ((),) * (2 * n))
    blocks = np.concatenate([np.arange(n) // each, np.arange(n)[::-1] // each]).astype(np.int32)
    planner = FreeAfterForwardPlanner(
        graph, np.ones(n, np.int64), np.ones(2 * n), np.full(n, -1, np.int32), blocks
    )
    assert planner.block_outputs == {each * block - 1 for block in range(1, n_blocks)}
    order = planner.order(planner.block_outputs)
    assert sorted([*order, *planner.block_outputs]) == planner.candidates == list(range(n))
    assert most_values(planner.schedule(set(order)), n) <= n_blocks - 1 + each < n
    assert most_values(planner.schedule(set(planner.candidates)), n) >= n


def most_values(schedule: Schedule, n_forward: int) -> int:
    """Return the largest number of resident values of a graph in which op and value have one number."""
    there, most = 0, 0
    for step in (*schedule.forward, *schedule.backward):
        there += (step.action == Action.COMPUTE and step.target < n_forward) - (step.action == Action.FREE)
        most = max(most, there)
    return most
