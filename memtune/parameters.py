"""The parameters of a step: one record each, and the same as columns for passes that treat many at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Parameter(NamedTuple):
    """One parameter of the model and the storages that belong to it (-1: none)."""

    name: str
    storage: int
    gradient: int
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    block: int
    """Index of the block that holds it, -1 outside every block."""


@dataclass(frozen=True, eq=False)
class ParameterColumns:
    """What a tuple of parameters says, one entry each."""

    names: tuple[str, ...]
    storage: npt.NDArray[np.int32]
    gradient: npt.NDArray[np.int32]
    shapes: tuple[tuple[int, ...], ...]
    itemsize: npt.NDArray[np.int32]
    trainable: npt.NDArray[np.bool_]
    block: npt.NDArray[np.int32]
    numel: npt.NDArray[np.int64]

    def records(self) -> tuple[Parameter, ...]:
        """The parameters these columns describe; `columns_of` finds the columns again."""
        rows = zip(
            self.names, self.storage.tolist(), self.gradient.tolist(), self.shapes, self.itemsize.tolist(),
            self.trainable.tolist(), self.block.tolist(), strict=True,
        )  # fmt: skip
        records = tuple(map(_record, rows))
        _remember(records, self)
        return records


_record: Callable[[tuple[Any, ...]], Parameter] = functools.partial(tuple.__new__, Parameter)
"""`Parameter._make` without a Python frame per record: it runs for every candidate."""
_REMEMBERED = 128
"""Tuples whose columns are kept, about 40 kB each for 300 parameters."""
_known: dict[int, tuple[tuple[Parameter, ...], ParameterColumns]] = {}


def columns_of(parameters: tuple[Parameter, ...]) -> ParameterColumns:
    """The columns of `parameters`; made once per tuple, since the steps of many candidates share it."""
    known = _known.get(id(parameters))
    if known is not None and known[0] is parameters:  # an id may come again when its tuple is gone
        return known[1]
    names, storage, gradient, shapes, itemsize, trainable, block = zip(*parameters, strict=True) if parameters else ((),) * 7
    columns = ParameterColumns(
        names, np.asarray(storage, np.int32), np.asarray(gradient, np.int32), shapes, np.asarray(itemsize, np.int32),
        np.asarray(trainable, bool), np.asarray(block, np.int32), numel_of(shapes),
    )  # fmt: skip
    _remember(parameters, columns)
    return columns


def numel_of(shapes: tuple[tuple[int, ...], ...]) -> npt.NDArray[np.int64]:
    """Elements of each shape."""
    return np.asarray([math.prod(shape) for shape in shapes], np.int64)


def _remember(parameters: tuple[Parameter, ...], columns: ParameterColumns) -> None:
    if len(_known) >= _REMEMBERED:
        del _known[next(iter(_known))]  # the oldest
    _known[id(parameters)] = parameters, columns
