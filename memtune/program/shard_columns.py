"""What is divided of a step, for every way of dividing it: rows of the parameters, and what belongs to
them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.program.edit import Edit
from memtune.program.parameter_columns import ParameterColumns, columns_of, numel_of
from memtune.program.step import I32, I64, Kind, Phase, Step

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Shards:
    """The largest shard (rank 0's) of every parameter, which is also what the others are padded to; one entry
    each.
    """

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
    index = np.full(
        step.storages.n + 1, -1, np.int32
    )  # (m + 1,) parameter whose gradient it is; the last serves -1
    index[gradient] = np.arange(len(gradient), dtype=np.int32)
    index[-1] = -1
    made = (gradient >= 0) & (step.storages.producer[gradient] >= 0)
    raw[made] = gradient[made]
    adds = (
        (step.uses.mode == 1)
        & (step.storages.producer[step.uses.storage] < 0)
        & (index[step.uses.storage] >= 0)
    )
    adds &= step.use_phase < Phase.BOUNDARY
    is_sum = np.zeros(step.storages.n, bool)
    is_sum[step.uses.storage[adds]] = True
    added = np.full(step.ops.n, -1, np.int32)  # what each of these ops adds
    others = ~is_sum[step.uses.storage]
    added[step.uses.op[others][::-1]] = step.uses.storage[others][::-1]
    raw[index[step.uses.storage[adds]]] = added[step.uses.op[adds]]
    return raw


@functools.lru_cache(maxsize=8)
def divided(step: Step) -> tuple[I32, I32]:
    """Storages that are divided with their parameter, and the row of that parameter."""
    columns = columns_of(step.parameters)
    mine = np.flatnonzero(step.storages.owner >= 0).astype(np.int32)
    owner = step.storages.owner[mine]
    raw = np.zeros(step.storages.n + 1, bool)
    raw[raw_gradients(step)] = True
    whole = (
        (step.storages.bytes[mine] % columns.numel[owner] == 0)
        & (step.storages.bytes[mine] >= columns.numel[owner])
        & ~raw[mine]
    )
    return mine[whole], owner[whole]


# The units in which FSDP2 gathers parameters, as columns: one row a unit, its parameters as a ragged list.
@dataclass(frozen=True, eq=False)
class Ragged:
    """Parts of different lengths, one after the other."""

    values: npt.NDArray[Any]
    count: I64
    """(parts,) values of each."""

    @cached_property
    def starts(self) -> I64:
        """(parts,) place of the first value of each."""
        return np.cumsum(self.count) - self.count

    @cached_property
    def part(self) -> I64:
        """(values,) part that each belongs to."""
        return np.repeat(np.arange(len(self.count)), self.count)

    @cached_property
    def _within(self) -> I64:
        return np.arange(len(self.values)) - self.starts[self.part]

    def places(self, begin: I64) -> I64:
        """(values,) where each value lies if part `i` begins at `begin[i]`."""
        return begin[self.part] + self._within

    def sums(self) -> I64:
        """(parts,) sum of each."""
        return np.bincount(self.part, self.values, len(self.count)).astype(
            np.int64
        )  # float64 is exact up to 2^53 bytes

    def picked(self, parts: npt.NDArray[np.intp]) -> Ragged:
        """The given parts in the given order."""
        count = self.count[parts]
        picked = Ragged(np.empty(int(count.sum()), self.values.dtype), count)
        return Ragged(self.values[picked.places(self.starts[parts])], count)

    def where(self, kept: npt.NDArray[np.bool_]) -> Ragged:
        """The values in `kept` alone; parts may become empty."""
        return Ragged(self.values[kept], np.bincount(self.part[kept], minlength=len(self.count)))


def column(size: int, dtype: npt.DTypeLike, *parts: tuple[npt.NDArray[Any] | slice, Any]) -> npt.NDArray[Any]:
    """(size,) the values of each part (places, values), zero elsewhere."""
    made = np.zeros(size, dtype)
    for places, values in parts:
        made[places] = values
    return made


@dataclass(frozen=True, eq=False)
class FsdpUnits:
    """Parameters that are gathered together, in forward order, and where in the step that happens: (units,)
    each.

    The root, what is in no block, comes first: its forward starts first.
    """

    parameters: Ragged
    """Rows of `step.parameters`, in the order in which FSDP2 lays them out."""
    has_root: bool
    first_forward: I32
    """Gathered before this op …"""
    last_forward: I32
    """… and freed after this one."""
    first_backward: I32
    last_backward: I32

    def __len__(self) -> int:
        """Number of units."""
        return len(self.first_forward)


@functools.lru_cache(maxsize=8)
def units_of(step: Step, blocks_per_unit: int) -> FsdpUnits:
    """The units of `step`; blocks without parameters or without a backward have none."""
    n_blocks = len(step.blocks)
    n_units = 1 + -(-n_blocks // blocks_per_unit)  # row 0 is the root until it is known whether there is one
    block = columns_of(step.parameters).block
    order = np.asarray(gathering_order(columns_of(step.parameters).names), np.int32)
    order = order[np.argsort(block[order], kind="stable")]
    count = np.bincount(_unit(block[order], blocks_per_unit), minlength=n_units)

    backward = np.flatnonzero(
        (step.ops.phase == Phase.BACKWARD) | (step.ops.phase == Phase.RECOMPUTE)
    ).astype(np.int32)
    first_backward, last_backward = _first_and_last(step, backward, n_units, blocks_per_unit)
    # What an earlier pass put around a block's forward (copies to the host) runs inside FSDP2's hooks.
    forward = np.flatnonzero(step.ops.phase == Phase.FORWARD).astype(np.int32)
    first_forward, last_forward = _first_and_last(step, forward, n_units, blocks_per_unit)
    starts = np.arange(0, n_blocks, blocks_per_unit)
    np.minimum(first_forward[1:], step.forward_starts[starts], out=first_forward[1:])
    np.maximum(
        last_forward[1:],
        step.forward_ends[np.minimum(starts + blocks_per_unit, n_blocks) - 1],
        out=last_forward[1:],
    )

    end = np.flatnonzero(step.ops.phase < Phase.BOUNDARY)[-1]
    inside = backward[step.ops.module[backward] != 0]
    first_forward[0], last_forward[0] = step.forward_starts[n_blocks], step.forward_ends[n_blocks]
    # Copies back of what the last block saved may come before any op of a module.
    first_backward[0] = min(
        int(inside[0]) if len(inside) else int(end), int(first_backward[1:].min(initial=end))
    )
    last_backward[0] = end
    there = np.flatnonzero((count > 0) & (last_backward >= 0))
    parameters = Ragged(order, count).picked(there)
    columns = (column[there] for column in (first_forward, last_forward, first_backward, last_backward))
    return FsdpUnits(parameters, bool(count[0]), *columns)


def _unit(block: I32, blocks_per_unit: int) -> I32:
    unit: I32 = np.where(block < 0, 0, 1 + block // blocks_per_unit)
    return unit


def _first_and_last(step: Step, ops: I32, n_units: int, blocks_per_unit: int) -> tuple[I32, I32]:
    """(units,) first and last of `ops` in the blocks of each unit: beyond every op and -1 where there is
    none.
    """
    unit = _unit(step.ops.block[ops], blocks_per_unit)
    first, last = np.full(n_units, step.ops.n, np.int32), np.full(n_units, -1, np.int32)
    first[unit[::-1]] = ops[::-1]  # the first one is written last
    last[unit] = ops
    return first, last


@functools.lru_cache(maxsize=16)
def gathering_order(names: tuple[str, ...]) -> list[int]:
    """Rows of `names` in FSDP2's order: a module's own parameters after those of its children
    (post-order).
    """
    tree: dict[str, Any] = {}
    for index, name in enumerate(names):
        *modules, own = name.split(".")
        node = tree
        for module in modules:
            node = node.setdefault(module + ".", {})
        node[own] = index

    def visit(node: dict[str, Any]) -> list[int]:
        children = [row for name, child in node.items() if name[-1:] == "." for row in visit(child)]
        return children + [row for name, row in node.items() if name[-1:] != "."]

    return visit(tree)
