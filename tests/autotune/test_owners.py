"""Whose storages are: one parameter at a time, and through ops that take lists of all of them."""

from __future__ import annotations

import time

import numpy as np

from memtune.autotune.owners import owners
from memtune.program import Parameter, Phase

PARAMETERS = [Parameter(f"p{i}", i, 2 + i, (4,), 4, True, 0) for i in range(2)]
OPTIMIZER = [Phase.OPTIMIZER] * 2


def found(uses: list[tuple[int, int]], n_storages: int = 10) -> list[int]:
    """Storages 0 and 1 are parameters, 2 and 3 their gradients."""
    rows = np.array([(op, storage, 0) for op, storage in uses], np.int32)
    return owners(n_storages, PARAMETERS, [-1] * n_storages, OPTIMIZER, rows).tolist()


def test_an_op_of_one_parameter_owns_what_it_touches() -> None:
    assert found([(0, 0), (0, 2), (0, 4), (1, 1), (1, 5)])[:7] == [0, 1, 0, 1, 0, 1, -1]


def test_a_fused_op_has_lists_in_one_order() -> None:
    """Weights, gradients, two moments, counters that an op before has counted up, and a rate that is no list."""
    lists = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert found([(0, 8), (0, 9), *((1, each) for each in lists)]) == [0, 1, 0, 1, 0, 1, 0, 1, -1, -1]
    assert found([(0, 8), (0, 9), *((1, each) for each in [*lists, 10])], 11) == [0, 1, 0, 1, 0, 1, 0, 1, -1, -1, -1]


def test_what_are_no_lists_of_one_length_is_nobody_s() -> None:
    assert found([(1, each) for each in [0, 1, 3, 2, 4, 5]]) == [0, 1, 0, 1, *[-1] * 6]
    assert found([(1, each) for each in [0, 4, 1, 5]]) == [0, 1, 0, 1, *[-1] * 6]


def seconds(n_parameters: int) -> float:
    """CPU time for one fused op over three lists of so many parameters; the best of three."""
    parameters = [Parameter(f"p{i}", i, -1, (4,), 4, True, 0) for i in range(n_parameters)]
    rows = np.zeros((3 * n_parameters, 3), np.int32)
    rows[:, 1] = range(3 * n_parameters)
    found, took = None, []
    for _ in range(3):
        before = time.process_time()
        found = owners(3 * n_parameters, parameters, [-1] * (3 * n_parameters), [Phase.OPTIMIZER], rows)
        took.append(time.process_time() - before)
    assert found is not None
    assert found.tolist() == 3 * list(range(n_parameters))
    return min(took)


def test_long_lists_take_time_in_proportion_to_their_length() -> None:
    """Eight times as many: 64 times the work where each is looked for among all before it."""
    assert seconds(8000) < 24 * seconds(1000)
