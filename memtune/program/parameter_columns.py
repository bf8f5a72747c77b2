"""Parameters of a step, as records and as columns for vectorized passes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt


class Parameter(NamedTuple):
    """One parameter of the model, with its storages (-1: none)."""

    name: str
    storage: int
    gradient: int
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    block: int
    """Index of the block that holds it, -1 outside every block."""


@dataclass(frozen=True, eq=False)
class ParameterColumns(Sequence[Parameter]):
    """Parameters as columns. As a sequence it yields records, which are made on first access."""

    names: tuple[str, ...]
    storage: npt.NDArray[np.int32]
    gradient: npt.NDArray[np.int32]
    shapes: tuple[tuple[int, ...], ...]
    itemsize: npt.NDArray[np.int32]
    trainable: npt.NDArray[np.bool_]
    block: npt.NDArray[np.int32]
    numel: npt.NDArray[np.int64]

    @property
    def n_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each parameter; of its shard where shapes are those of shards."""
        return self.numel * self.itemsize

    @cached_property
    def records(self) -> tuple[Parameter, ...]:
        """The parameters as records."""
        rows = zip(
            self.names,
            self.storage.tolist(),
            self.gradient.tolist(),
            self.shapes,
            self.itemsize.tolist(),
            self.trainable.tolist(),
            self.block.tolist(),
            strict=True,
        )
        return tuple(map(Parameter._make, rows))

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> Parameter: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Parameter, ...]: ...
    def __getitem__(self, index: int | slice) -> Parameter | tuple[Parameter, ...]:
        return self.records[index]

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self.records)


_REMEMBERED = 128
"""Most tuples whose columns are cached, about 40 kB each for 300 parameters."""
_known: dict[int, tuple[Sequence[Parameter], ParameterColumns]] = {}


def columns_of(parameters: Sequence[Parameter]) -> ParameterColumns:
    """Return the columns of `parameters`, cached by tuple, since the steps of many candidates share it."""
    if isinstance(parameters, ParameterColumns):
        return parameters
    known = _known.get(id(parameters))
    if known is not None and known[0] is parameters:  # ids are reused after a tuple is freed
        return known[1]
    names, storage, gradient, shapes, itemsize, trainable, block = (
        zip(*parameters, strict=True) if parameters else ((),) * 7
    )
    columns = ParameterColumns(
        names,
        np.asarray(storage, np.int32),
        np.asarray(gradient, np.int32),
        shapes,
        np.asarray(itemsize, np.int32),
        np.asarray(trainable, bool),
        np.asarray(block, np.int32),
        numel_of(shapes),
    )
    if len(_known) >= _REMEMBERED:
        del _known[next(iter(_known))]  # dicts keep insertion order: this is the oldest
    _known[id(parameters)] = parameters, columns
    return columns


def numel_of(shapes: tuple[tuple[int, ...], ...]) -> npt.NDArray[np.int64]:
    """Return the number of elements of each shape."""
    return np.asarray([math.prod(shape) for shape in shapes], np.int64)


def is_in_expert(name: str) -> bool:
    """Return whether the parameter `name` is in a list of experts, which not every sample (and rank) uses."""
    return split_expert_name(name) is not None


def split_expert_name(name: str) -> tuple[str, str, str] | None:
    """Split a parameter's name into path of the experts' list, number and rest; None if it is in no list."""
    parts = name.split(".")
    for i in range(1, len(parts) - 1):
        if parts[i].isdigit() and "expert" in parts[i - 1]:
            return ".".join(parts[:i]), parts[i], ".".join(parts[i + 1 :])
    return None
