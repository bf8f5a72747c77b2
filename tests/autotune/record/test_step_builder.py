"""Owners of storages: by one parameter at a time, and through ops on lists of all parameters."""

from __future__ import annotations

import numpy as np

from memtune.autotune.record.step_builder import _own_list_operands, owners
from memtune.program.step import Parameter, Phase

PARAMETERS = [Parameter(f"p{i}", i, 2 + i, (4,), 4, True, 0) for i in range(2)]
OPTIMIZER = [Phase.OPTIMIZER] * 2


def found(uses: list[tuple[int, int]], n_storages: int = 10) -> list[int]:
    """Storages 0 and 1 are parameters, 2 and 3 their gradients."""
    rows = np.array([(op, storage, 0) for op, storage in uses], np.int32)
    return owners(n_storages, PARAMETERS, [-1] * n_storages, OPTIMIZER, rows).tolist()


def test_owners_assigns_operands_of_single_parameter_op() -> None:
    assert found([(0, 0), (0, 2), (0, 4), (1, 1), (1, 5)])[:7] == [0, 1, 0, 1, 0, 1, -1]


def test_owners_assigns_list_operands_by_position() -> None:
    """Weights, gradients, two moments, counters that an op before has counted up, and a rate that is
    no list.
    """
    lists = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert found([(0, 8), (0, 9), *((1, each) for each in lists)]) == [0, 1, 0, 1, 0, 1, 0, 1, -1, -1]
    assert found([(0, 8), (0, 9), *((1, each) for each in [*lists, 10])], 11) == [
        0,
        1,
        0,
        1,
        0,
        1,
        0,
        1,
        -1,
        -1,
        -1,
    ]


def test_owners_leaves_lists_of_unequal_length_unowned() -> None:
    assert found([(1, each) for each in [0, 1, 3, 2, 4, 5]]) == [0, 1, 0, 1, *[-1] * 6]
    assert found([(1, each) for each in [0, 4, 1, 5]]) == [0, 1, 0, 1, *[-1] * 6]


class Counted(int):
    """A parameter's index that counts how often it is hashed or compared with another."""

    n = 0

    def __hash__(self) -> int:
        Counted.n += 1
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        Counted.n += 1
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        Counted.n += 1
        return int.__ne__(self, other)


def test_owners_takes_linear_time_in_list_length() -> None:
    """Each index is looked up a few times; where it is looked for among all before it, 4,000 times on
    average.
    """
    n_parameters = 8000
    owner = np.array(
        [*(Counted(i) for i in range(n_parameters)), *(Counted(-1) for _ in range(2 * n_parameters))], object
    )
    Counted.n = 0
    _own_list_operands(owner, list(range(3 * n_parameters)), set())
    assert n_parameters <= Counted.n <= 8 * n_parameters
    assert owner.tolist() == 3 * list(range(n_parameters))
