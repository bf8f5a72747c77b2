"""Schedules: equal results to the plain order; values freed too early and ops run twice are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from memtune.program.op_schedule import (
    Action,
    OpGraph,
    Schedule,
    ScheduleStep,
    build_schedule,
    find_schedule_error,
    plain_schedule,
)


def chain(n: int) -> OpGraph:
    """Return n chained forward ops, and n backward ops that read the input of theirs and the gradient."""
    reads = [(i - 1,) if i else () for i in range(n)]
    reads += [
        tuple(sorted({*((i - 1,) if i else ()), *((2 * n - 2 - i,) if i < n - 1 else ())}))
        for i in reversed(range(n))
    ]
    return OpGraph(
        tuple(f"f{i}" for i in range(2 * n)),
        n,
        tuple((i,) for i in range(2 * n)),
        tuple(reads),
        ((),) * (2 * n),
    )


@st.composite
def graphs(draw: st.DrawFn) -> OpGraph:
    n = draw(st.integers(2, 9))
    reads = tuple(
        tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else () for i in range(n)
    )
    return OpGraph(
        tuple(f"op{i}" for i in range(n)),
        draw(st.integers(1, n - 1)),
        tuple((i,) for i in range(n)),
        reads,
        ((),) * n,
    )


@settings(max_examples=60, deadline=None)
@given(graphs(), st.data())
def test_find_schedule_error_reports_freed_values(graph: OpGraph, data: st.DataObject) -> None:
    plain = plain_schedule(graph)
    assert find_schedule_error(graph, plain) == ""
    assert Schedule.from_plain(plain.to_plain()) == plain
    frees = [(i, step) for i, step in enumerate(plain.backward) if step.action == Action.FREE]
    computes = [(i, step) for i, step in enumerate(plain.backward) if step.action == Action.COMPUTE]
    at, step = data.draw(st.sampled_from(computes))
    assert find_schedule_error(graph, replace(plain, backward=plain.backward[:at] + plain.backward[at + 1 :]))
    at, step = data.draw(st.sampled_from(frees))
    assert "is not live" in find_schedule_error(graph, replace(plain, backward=(*plain.backward, step)))


def test_build_schedule_frees_values_before_recomputation() -> None:
    graph = chain(3)
    again = build_schedule(graph, range(3), [3, 0, 1, 4, 0, 5])
    assert find_schedule_error(graph, again) == ""
    assert [step for step in again.forward if step.action == Action.FREE] == [
        ScheduleStep(Action.FREE, 0),
        ScheduleStep(Action.FREE, 2),
    ]
    assert again.computes().count(0) == 3


def test_find_schedule_error_reports_reads_of_another_version() -> None:
    """op0 makes, op1 reads, op2 writes in place, op3 reads."""
    graph = OpGraph(
        ("make", "read", "write", "read"),
        2,
        ((0,), (1,), (), (2,)),
        ((), (0,), (0,), (0,)),
        ((), (), (0,), ()),
    )
    assert find_schedule_error(graph, plain_schedule(graph)) == ""
    assert "more or fewer writes" in find_schedule_error(graph, build_schedule(graph, [0, 1], [2, 1, 3]))
    assert find_schedule_error(graph, build_schedule(graph, [0, 1], [2, 0, 1, 0, 2, 3])) == ""
    assert "more or fewer writes" in find_schedule_error(graph, build_schedule(graph, [0, 1], [2, 0, 3]))


def test_find_schedule_error_reports_repeated_and_missing_ops() -> None:
    graph = replace(chain(2), once=frozenset({0}))
    assert "runs 2 times" in find_schedule_error(graph, build_schedule(graph, [0, 1], [2, 0, 3]))
    assert "runs 0 times" in find_schedule_error(chain(2), build_schedule(chain(2), [0, 1], [2]))
    assert "another region" in find_schedule_error(graph, replace(plain_schedule(graph), graph="x"))


@pytest.mark.parametrize("back", [True, False])
def test_find_schedule_error_requires_reload_of_offloaded_value(back: bool) -> None:
    graph = OpGraph(("a", "b"), 1, ((0,), (1,)), ((), (0,)), ((), ()))
    offload = ScheduleStep(Action.TO_HOST, 0), ScheduleStep(Action.FREE, 0)
    reload = (ScheduleStep(Action.FROM_HOST, 0),) if back else ()
    plain = plain_schedule(graph)
    moved = replace(plain, forward=plain.forward + offload, backward=reload + plain.backward)
    assert (find_schedule_error(graph, moved) == "") == back


def test_graph_hash_depends_on_ops_and_dependences() -> None:
    graph = chain(3)
    other = replace(graph, reads=(*graph.reads[:-1], (0,)))
    assert len({graph.sha256, other.sha256, chain(4).sha256}) == 3
    assert replace(graph, random=frozenset({1})).sha256 == graph.sha256
