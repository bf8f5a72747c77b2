"""The units in which FSDP2 gathers parameters, as columns: one row a unit, its parameters as a ragged list."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.parameters import columns_of
from memtune.program import I32, I64, Phase, Step


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
        return np.bincount(self.part, self.values, len(self.count)).astype(np.int64)  # float64 is exact up to 2^53 bytes

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
class Units:
    """Parameters that are gathered together, in forward order, and where in the step that happens: (units,) each.

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
def units_of(step: Step, blocks_per_unit: int) -> Units:
    """The units of `step`; blocks without parameters or without a backward have none."""
    n_blocks = len(step.blocks)
    n_units = 1 + -(-n_blocks // blocks_per_unit)  # row 0 is the root until it is known whether there is one
    block = columns_of(step.parameters).block
    order = np.asarray(gathering_order(columns_of(step.parameters).names), np.int32)
    order = order[np.argsort(block[order], kind="stable")]
    count = np.bincount(_unit(block[order], blocks_per_unit), minlength=n_units)

    backward = np.flatnonzero((step.op_phase == Phase.BACKWARD) | (step.op_phase == Phase.RECOMPUTE)).astype(np.int32)
    first_backward, last_backward = _first_and_last(step, backward, n_units, blocks_per_unit)
    # What an earlier pass put around a block's forward (copies to the host) runs inside FSDP2's hooks.
    forward = np.flatnonzero(step.op_phase == Phase.FORWARD).astype(np.int32)
    first_forward, last_forward = _first_and_last(step, forward, n_units, blocks_per_unit)
    starts = np.arange(0, n_blocks, blocks_per_unit)
    np.minimum(first_forward[1:], step.enter[starts], out=first_forward[1:])
    np.maximum(last_forward[1:], step.leave[np.minimum(starts + blocks_per_unit, n_blocks) - 1], out=last_forward[1:])

    end = np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1]
    inside = backward[step.op_module[backward] != 0]
    first_forward[0], last_forward[0] = step.enter[n_blocks], step.leave[n_blocks]
    # Copies back of what the last block saved may come before any op of a module.
    first_backward[0] = min(int(inside[0]) if len(inside) else int(end), int(first_backward[1:].min(initial=end)))
    last_backward[0] = end
    there = np.flatnonzero((count > 0) & (last_backward >= 0))
    parameters = Ragged(order, count).picked(there)
    columns = (column[there] for column in (first_forward, last_forward, first_backward, last_backward))
    return Units(parameters, bool(count[0]), *columns)


def _unit(block: I32, blocks_per_unit: int) -> I32:
    unit: I32 = np.where(block < 0, 0, 1 + block // blocks_per_unit)
    return unit


def _first_and_last(step: Step, ops: I32, n_units: int, blocks_per_unit: int) -> tuple[I32, I32]:
    """(units,) first and last of `ops` in the blocks of each unit: beyond every op and -1 where there is none."""
    unit = _unit(step.op_block[ops], blocks_per_unit)
    first, last = np.full(n_units, step.n_ops, np.int32), np.full(n_units, -1, np.int32)
    first[unit[::-1]] = ops[::-1]  # the first one is written last
    last[unit] = ops
    return first, last


@functools.lru_cache(maxsize=16)
def gathering_order(names: tuple[str, ...]) -> list[int]:
    """Rows of `names` in FSDP2's order: a module's own parameters after those of its children (post-order)."""
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
