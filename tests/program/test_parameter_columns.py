"""Parameters as columns and as records."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np

from memtune.program.parameter_columns import Parameter, columns_of

WEIGHT = Parameter("a.weight", 3, 7, (4, 5), 2, True, 0)
FROZEN = Parameter("b.scale", 1, -1, (), 4, False, -1)


def test_columns_of_equal_records() -> None:
    parameters = (WEIGHT, FROZEN)
    columns = columns_of(parameters)
    assert columns.numel.tolist() == [20, 1]
    assert columns.trainable.tolist() == [True, False]
    assert columns.records == parameters
    assert all(type(value) is type(known) for value, known in zip(columns.records[0], WEIGHT, strict=True))


def test_columns_are_a_sequence_of_records() -> None:
    plain = columns_of((WEIGHT, FROZEN))
    assert plain.records == (WEIGHT, FROZEN)  # cached, and not copied by `replace`
    columns = replace(plain, gradient=np.asarray([9, -1], np.int32))
    assert tuple(columns) == (WEIGHT._replace(gradient=9), FROZEN)
    assert columns[1] == FROZEN
    assert columns[:1] == (WEIGHT._replace(gradient=9),)
    assert len(columns) == 2
    assert not columns_of(())
    assert columns_of(columns) is columns


def test_columns_of_does_not_confuse_tuples_with_reused_ids() -> None:
    for number in range(300):  # more than are cached, at reused addresses
        parameters = (WEIGHT._replace(storage=number),)
        assert columns_of(parameters).storage.tolist() == [number]
        assert columns_of(parameters) is columns_of(parameters)
        del parameters
        gc.collect(0)
    assert columns_of(()).names == ()
