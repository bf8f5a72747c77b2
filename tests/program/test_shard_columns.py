"""FSDP units of a small GPT, and ragged arrays compared with lists."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.sharding_programs import step

from memtune.program.shard_columns import Ragged, gathering_order, units_of
from memtune.program.step import Phase

PARTS = st.lists(st.lists(st.integers(0, 2**40), max_size=4), min_size=1, max_size=6)


def ragged(parts: list[list[int]]) -> Ragged:
    return Ragged(
        np.asarray([value for part in parts for value in part], np.int64), np.asarray([len(p) for p in parts])
    )


def lists(of: Ragged) -> list[list[int]]:
    return [
        of.values[start : start + count].tolist() for start, count in zip(of.starts, of.count, strict=True)
    ]


@settings(max_examples=50, deadline=None)
@given(PARTS, st.randoms(use_true_random=False))
def test_ragged_equals_lists(parts: list[list[int]], random: Random) -> None:
    of = ragged(parts)
    assert of.sums().tolist() == [sum(part) for part in parts]
    order = list(range(len(parts)))
    random.shuffle(order)
    assert lists(of.picked(np.asarray(order))) == [parts[i] for i in order]
    assert lists(of.where(of.values % 2 == 0)) == [
        [value for value in part if value % 2 == 0] for part in parts
    ]
    begin = 10 * np.arange(len(parts))
    assert of.places(begin).tolist() == [
        10 * i + place for i, part in enumerate(parts) for place in range(len(part))
    ]


@pytest.mark.parametrize("blocks_per_unit", [1, 2, 3])
def test_units_of_assigns_each_parameter_to_its_block_unit(blocks_per_unit: int) -> None:
    plain = step()
    units = units_of(plain, blocks_per_unit)
    assert sorted(units.parameters.values.tolist()) == list(range(len(plain.parameters)))
    groups = [
        {plain.parameters[i].block // blocks_per_unit for i in part} for part in lists(units.parameters)
    ]
    assert units.has_root
    assert groups == [{-1}, *({unit} for unit in range(-(-len(plain.blocks) // blocks_per_unit)))]
    for number in range(1, len(units)):
        blocks = plain.ops.block // blocks_per_unit == number - 1
        backward = np.flatnonzero(blocks & (plain.ops.block >= 0) & (plain.ops.phase == Phase.BACKWARD))
        assert (units.first_backward[number], units.last_backward[number]) == (backward[0], backward[-1])
        forward = np.flatnonzero(blocks & (plain.ops.block >= 0) & (plain.ops.phase == Phase.FORWARD))
        assert units.first_forward[number] <= forward[0]
        assert units.last_forward[number] >= forward[-1]


def test_gathering_order_puts_children_first() -> None:
    assert gathering_order(("w", "b.w", "b.x.w", "a.w")) == [2, 1, 3, 0]
