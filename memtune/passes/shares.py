"""What is divided of a step, for every way of dividing it: rows of the parameters, and what belongs to them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.parameters import ParameterColumns, columns_of, numel_of
from memtune.passes.units import column
from memtune.program import I32, I64, Kind, Phase, Step

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Shards:
    """The largest shard (rank 0's) of every parameter, which is also what the others are padded to; one entry each."""

    shapes: tuple[tuple[int, ...], ...]
    numel: I64
    n_bytes: I64
    uneven: Mask
    """Whether the ranks do not divide the first dimension."""


@functools.lru_cache(maxsize=64)
def shards_of(columns: ParameterColumns, degree: int) -> Shards:
    """The shards of every parameter over `degree` ranks."""
    shapes = tuple((-(-shape[0] // degree), *shape[1:]) if shape else shape for shape in columns.shapes)
    numel = numel_of(shapes)
    uneven = np.asarray([not shape or shape[0] % degree > 0 for shape in columns.shapes], bool)
    return Shards(shapes, numel, numel * columns.itemsize, uneven)


def add_storages(edit: Edit, parts: list[tuple[I64, I32, I64, Kind]]) -> I32:
    """Add storages given by kind: (place among the new ones, producer, bytes, kind) each."""
    count = sum(len(place) for place, *_ in parts)
    return edit.add_storages(
        column(count, np.int64, *((place, n_bytes) for place, _, n_bytes, _ in parts)),
        producer=column(count, np.int32, *((place, producer) for place, producer, _, _ in parts)),
        kind=column(count, np.uint8, *((place, kind) for place, _, _, kind in parts)),
    )


def raw_gradients(step: Step) -> I32:
    """(parameters,) the storage that this micro-batch's gradient is made in, -1 for none."""
    gradient = columns_of(step.parameters).gradient
    raw = np.full(len(gradient), -1, np.int32)
    index = np.full(step.n_storages + 1, -1, np.int32)  # (m + 1,) parameter whose gradient it is; the last serves -1
    index[gradient] = np.arange(len(gradient), dtype=np.int32)
    index[-1] = -1
    made = (gradient >= 0) & (step.producer[gradient] >= 0)
    raw[made] = gradient[made]
    adds = (step.use_mutates == 1) & (step.producer[step.use_storage] < 0) & (index[step.use_storage] >= 0)
    adds &= step.use_phase < Phase.BOUNDARY
    is_sum = np.zeros(step.n_storages, bool)
    is_sum[step.use_storage[adds]] = True
    added = np.full(step.n_ops, -1, np.int32)  # what each of these ops adds
    others = ~is_sum[step.use_storage]
    added[step.use_op[others][::-1]] = step.use_storage[others][::-1]
    raw[index[step.use_storage[adds]]] = added[step.use_op[adds]]
    return raw


@functools.lru_cache(maxsize=8)
def divided(step: Step) -> tuple[I32, I32]:
    """Storages that are divided with their parameter, and the row of that parameter."""
    columns = columns_of(step.parameters)
    mine = np.flatnonzero(step.owner >= 0).astype(np.int32)
    owner = step.owner[mine]
    raw = np.zeros(step.n_storages + 1, bool)
    raw[raw_gradients(step)] = True
    whole = (step.bytes[mine] % columns.numel[owner] == 0) & (step.bytes[mine] >= columns.numel[owner]) & ~raw[mine]
    return mine[whole], owner[whole]
