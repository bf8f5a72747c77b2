"""Combinations for the saved tensors of one block, compared with all possible ones."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from memtune.search_spaces.recompute._block_planner import tensor_options
from memtune.search_spaces.recompute._block_planner.tensor_options import (
    Action,
    BlockOp,
    Combination,
    combinations,
    price,
)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[BlockOp, ...]:
    ops = []
    for i in range(draw(st.integers(1, 6))):
        reads = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else ()
        saved = draw(st.booleans())
        dear = draw(st.booleans())
        ops.append(
            BlockOp(
                f"op{i}", float(draw(st.integers(1, 9))), reads, draw(st.integers(1, 9)), saved, saved or dear
            )
        )
    return tuple(ops)


def all_decisions(ops: tuple[BlockOp, ...]) -> set[tuple[int, float]]:
    """Return bytes and seconds of every set of kept ops from which the rest can be recomputed."""
    found = set()
    for keep in product(*((False, True) if op.keepable else (False,) for op in ops)):
        run: set[int] = set()
        waiting = [i for i, op in enumerate(ops) if op.saved and not keep[i]]
        while waiting:
            i = waiting.pop()
            run.add(i)
            waiting += [source for source in ops[i].reads if not keep[source] and source not in run]
        asked = {i for i, op in enumerate(ops) if op.saved} | {source for i in run for source in ops[i].reads}
        found.add((sum(ops[i].bytes for i in asked if keep[i]), sum(ops[i].seconds for i in run)))
    return found


def costs(found: list[Combination]) -> list[tuple[int, float]]:
    return [(each.held_bytes, each.seconds) for each in found]


@settings(deadline=None, max_examples=200)
@given(blocks())
def test_combinations_are_undominated(ops: tuple[BlockOp, ...]) -> None:
    known = all_decisions(ops)
    best = {
        (held, s)
        for held, s in known
        if not any(h <= held and t <= s and (h, t) != (held, s) for h, t in known)
    }
    assert set(costs(combinations(ops, 100))) == best


@settings(deadline=None, max_examples=100)
@given(blocks(), st.integers(2, 4))
def test_few_combinations_include_both_ends(ops: tuple[BlockOp, ...], limit: int) -> None:
    whole, few = costs(combinations(ops, 100)), costs(combinations(ops, limit))
    assert len(few) <= limit
    assert set(few) <= set(whole)
    assert {whole[0], whole[-1]} <= set(few)


CHAIN = tuple(BlockOp(f"op{i}", 1.0, (i - 1,) if i else (), 10, saved=True, keepable=True) for i in range(4))


def test_shared_chain_is_paid_once() -> None:
    assert costs(combinations(CHAIN, 100)) == [(40, 0.0), (30, 1.0), (20, 2.0), (10, 3.0), (0, 4.0)]
    dear_start = (
        BlockOp("dear", 9.0, (), 10, False, True),
        *(BlockOp(f"op{i}", 1.0, (0,), 10, True, True) for i in range(3)),
    )
    assert costs(combinations(dear_start, 100)) == [(30, 0.0), (20, 2.0), (10, 3.0), (0, 12.0)]


def test_unkeepable_tensor_is_recomputed() -> None:
    ops = (*CHAIN[:3], BlockOp("written into", 1.0, (2,), 10, saved=True, keepable=False))
    assert all(3 in each.again for each in combinations(ops, 100))


def test_tensor_is_offloaded_where_that_is_cheaper_than_recompute() -> None:
    ops = (
        BlockOp("dear", 9.0, (), 10, True, True, {Action.HOST: 2.0}),
        BlockOp("cheap", 1.0, (0,), 10, True, True, {Action.HOST: 2.0}),
    )
    found = combinations(ops, 100)
    assert costs(found) == [(20, 0.0), (10, 1.0), (0, 3.0)]
    assert found[-1].actions == (Action.HOST, Action.RECOMPUTE)


@pytest.mark.parametrize("action", [Action.SSD, Action.SPLIT])
def test_offload_action_without_price_is_never_chosen(action: Action) -> None:
    assert all(action not in each.actions for each in combinations(CHAIN, 100))
    priced = tuple(
        BlockOp(op.name, op.seconds, op.reads, op.bytes, True, True, {action: 0.5}) for op in CHAIN
    )
    assert combinations(priced, 100)[-1].actions == (action,) * 4


def test_many_alike_tensors_are_decided_together_first_and_then_one_by_one() -> None:
    experts = tuple(BlockOp("silu", 1.0, (), 10, True, True) for _ in range(40))
    found = costs(combinations(experts, 100))
    assert {(400, 0.0), (390, 1.0), (10, 39.0), (0, 40.0)} <= set(found)
    assert all(held == 400 - 10 * seconds for held, seconds in found)


@pytest.mark.parametrize("kinds", [3, 600])
def test_combinations_of_a_recurrence_are_bounded(kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A time step reads the one before it; a hundred thousand pairs of tensors would take minutes.
    steps = tuple(BlockOp(f"op{i % kinds}", 1.0, (i - 1,) if i else (), 10, True, True) for i in range(600))
    cells: list[int] = []

    def counted(ops: tuple[BlockOp, ...], undecided: list[int], retained: Any, offload: Any) -> Any:
        cells.append(len(ops) * retained.shape[1])
        return price(ops, undecided, retained, offload)

    monkeypatch.setattr(tensor_options, "price", counted)
    found = costs(combinations(steps, 100))
    assert max(cells) < 1.2 * tensor_options._CELLS
    assert {(6000, 0.0), (0, 600.0)} <= set(found)
    assert len(found) > 20
