"""Schedules: what the plain order computes, they compute; what they let go too early or run twice is
found.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtune.program.op_schedule import Action, Do, OpGraph, Schedule, plain_schedule, scheduled, wrong_with


def chain(n: int) -> OpGraph:
    """n forward ops in a row, and n backward ops of which each reads what its forward op read and the
    gradient.
    """
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
def test_missing_values_are_found(graph: OpGraph, data: st.DataObject) -> None:
    plain = plain_schedule(graph)
    assert wrong_with(graph, plain) == ""
    assert Schedule.from_plain(plain.to_plain()) == plain
    frees = [(i, step) for i, step in enumerate(plain.backward) if step.action == Action.FREE]
    computes = [(i, step) for i, step in enumerate(plain.backward) if step.action == Action.COMPUTE]
    at, step = data.draw(st.sampled_from(computes))
    assert wrong_with(graph, replace(plain, backward=plain.backward[:at] + plain.backward[at + 1 :]))
    at, step = data.draw(st.sampled_from(frees))
    assert "not there" in wrong_with(graph, replace(plain, backward=(*plain.backward, step)))


def test_what_is_run_again_is_let_go_in_between() -> None:
    graph = chain(3)
    again = scheduled(graph, range(3), [3, 0, 1, 4, 0, 5])
    assert wrong_with(graph, again) == ""
    assert [step for step in again.forward if step.action == Action.FREE] == [
        Do(Action.FREE, 0),
        Do(Action.FREE, 2),
    ]
    assert again.computes().count(0) == 3


def test_a_value_is_read_after_the_writes_that_it_has_seen_in_plain_order() -> None:
    """op0 makes, op1 reads, op2 writes in place, op3 reads."""
    graph = OpGraph(
        ("make", "read", "write", "read"),
        2,
        ((0,), (1,), (), (2,)),
        ((), (0,), (0,), (0,)),
        ((), (), (0,), ()),
    )
    assert wrong_with(graph, plain_schedule(graph)) == ""
    assert "written to in between" in wrong_with(graph, scheduled(graph, [0, 1], [2, 1, 3]))
    assert wrong_with(graph, scheduled(graph, [0, 1], [2, 0, 1, 0, 2, 3])) == ""
    assert "written to in between" in wrong_with(graph, scheduled(graph, [0, 1], [2, 0, 3]))


def test_what_must_run_once_runs_once() -> None:
    graph = replace(chain(2), once=frozenset({0}))
    assert "runs 2 times" in wrong_with(graph, scheduled(graph, [0, 1], [2, 0, 3]))
    assert "runs 0 times" in wrong_with(chain(2), scheduled(chain(2), [0, 1], [2]))
    assert "another region" in wrong_with(graph, replace(plain_schedule(graph), graph="x"))


@pytest.mark.parametrize("back", [True, False])
def test_what_was_moved_must_be_brought_back(back: bool) -> None:
    graph = OpGraph(("a", "b"), 1, ((0,), (1,)), ((), (0,)), ((), ()))
    leave, fetch = (Do(Action.TO_HOST, 0), Do(Action.FREE, 0)), Do(Action.FROM_HOST, 0)
    plain = plain_schedule(graph)
    moved = replace(
        plain, forward=plain.forward + leave, backward=((fetch,) if back else ()) + plain.backward
    )
    assert (wrong_with(graph, moved) == "") == back


def test_the_hash_is_of_the_ops_and_their_edges() -> None:
    graph = chain(3)
    other = replace(graph, reads=(*graph.reads[:-1], (0,)))
    assert len({graph.sha256, other.sha256, chain(4).sha256}) == 3
    assert replace(graph, random=frozenset({1})).sha256 == graph.sha256
