"""Rows of a schedule step whose op runs in parts, with other ops along; the pass of that code in `codegen`.

The op's output is allocated first. Then, for each part, the ops along compute their part, the op computes its
own from those, and the result is copied to its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.activations.schedules.region_pass import Region
from memtune.program import (
    I32,
    ON_GPU_ONLY,
    READS,
    WRITES,
    Kind,
    Resource,
    ScheduleStep,
    Step,
    Uses,
    parts_of,
)


class Role(Enum):
    """Function of a row in its step."""

    EMPTY = auto()
    """Allocates the op's output."""
    ALONG = auto()
    """Computes a part of a value that never exists whole."""
    RESULT = auto()
    """Computes a part of the op's output."""
    COPY = auto()
    """Copies that part to its place."""


@dataclass(frozen=True)
class PartRow:
    """Row of a step that runs in parts."""

    role: Role
    op: int
    """Number in the region."""
    share: float
    """Fraction of all elements."""
    bytes: int = 0
    """Bytes of the storage that it makes; 0 for EMPTY, which makes the op's own."""
    uses: list[tuple[int, int]] = field(default_factory=list)
    """(storage, use), set when storages are known."""


def elements_of(step: Step, region: Region) -> Sequence[int]:
    """Return (n,) the elements of each elementwise op's output in the region, 0 for other ops."""
    graph = region.graph
    found = []
    for op, (row, made) in enumerate(zip(region.rows.tolist(), graph.makes, strict=True)):
        size = int(step.ops.elementwise_bytes[row])
        written = bool(graph.writes[op]) or any(value in graph.writers for value in made)
        # An op that mutates, or whose output is mutated, cannot be computed part by part.
        plain = 0 < size < ON_GPU_ONLY and len(made) == 1 and not written and not region.scratch_bytes[op]
        found.append(int(region.bytes[made[0]]) // size if plain else 0)
    return found


def part_rows(step: Step, region: Region, compute: ScheduleStep) -> list[PartRow]:
    """Return the rows of `compute`, in order."""
    size = {op: int(step.ops.elementwise_bytes[region.rows[op]]) for op in (*compute.along, compute.target)}
    n_elements = int(region.bytes[region.graph.makes[compute.target][0]]) // size[compute.target]
    rows = [PartRow(Role.EMPTY, compute.target, 0.0)]
    for start, end in parts_of(n_elements, compute.parts):
        share = (end - start) / n_elements
        rows += [PartRow(Role.ALONG, op, share, (end - start) * size[op]) for op in compute.along]
        rows += [
            PartRow(role, compute.target, share, (end - start) * size[compute.target])
            for role in (Role.RESULT, Role.COPY)
        ]
    return rows


class PartStorages:
    """Assigns storages to the rows of such steps.

    Args:
        step: The plain step.
        region: Region of the step.
        rows: New row → its function.
    """

    def __init__(self, step: Step, region: Region, rows: dict[int, PartRow]) -> None:
        self._step, self._region, self._rows = step, region, rows
        self._start = np.searchsorted(step.uses.op, np.arange(step.ops.n + 1))
        self._parts: dict[int, int] = {}  # storage of the plain step → its current part
        self._result = -1

    def enter(self, new: int, now: dict[int, int], number: int) -> bool:
        """Set the uses of row `new`; return whether it makes a part, which becomes storage `number`."""
        part, region = self._rows[new], self._region
        storage = int(region.storages[region.graph.makes[part.op][0]])
        if part.role is Role.EMPTY:
            # The start of an op: parts of the previous one are no longer valid.
            self._parts.clear()
            return False
        if part.role is Role.COPY:
            whole = now.get(storage, storage)
            # `copy_` of a slice keeps the rest of the whole, so it reads as well as writes it.
            part.uses[:] = [(whole, int(READS)), (self._result, int(READS)), (whole, int(WRITES))]
            return False
        row = int(region.rows[part.op])
        span = slice(self._start[row], self._start[row + 1])
        read, how = self._step.uses.storage[span].tolist(), self._step.uses.mode[span].tolist()
        part.uses[:] = [(self._parts.get(s, now.get(s, s)), h) for s, h in zip(read, how, strict=True)]
        if part.role is Role.ALONG:
            self._parts[storage] = number
        else:
            self._result = number
        return True


def part_columns(ops: dict[str, Any], rows: dict[int, PartRow], empty: int, copy: int) -> None:
    """Change the op columns of rows of such steps; `empty` and `copy` are names."""
    at = np.asarray(list(rows), np.int32)
    share = np.asarray([part.share for part in rows.values()])
    ops["flops"][at] *= share
    ops["traffic_bytes"][at] = (ops["traffic_bytes"][at] * share).astype(np.int64)
    # No longer an op that a schedule may divide into parts.
    ops["elementwise_bytes"][at] = 0
    for new, part in rows.items():
        if part.role is Role.EMPTY:
            ops["name"][new], ops["resource"][new] = empty, Resource.NOTHING
        elif part.role is Role.COPY:
            ops["name"][new], ops["flops"][new], ops["traffic_bytes"][new] = copy, 0.0, 2 * part.bytes


def part_storages(columns: dict[str, Any], bytes_of: dict[int, int]) -> None:
    """Change the storage columns of parts: their sizes, and that they are no gradients."""
    at = np.asarray(list(bytes_of), np.int32)
    columns["bytes"][at] = list(bytes_of.values())
    columns["kind"][at], columns["owner"][at], columns["grad_ready_after"][at] = Kind.TEMPORARY, -1, -1


def uses_of(
    step: Step,
    order: I32,
    patches: dict[int, dict[int, int]],
    rows: dict[int, PartRow],
    by_shape: npt.NDArray[np.bool_],
) -> Uses:
    """Return the uses of the new step: those of the old rows with storages replaced by `patches`, or those of
    a part.

    Rows where `by_shape` is true use nothing.
    """
    start = np.searchsorted(step.uses.op, np.arange(step.ops.n + 1))
    count = (start[1:] - start[:-1])[order]
    count[by_shape] = 0
    count[list(rows)] = [len(part.uses) for part in rows.values()]
    new_start = np.concatenate([[0], np.cumsum(count)])
    index = np.arange(new_start[-1]) - np.repeat(new_start[:-1], count) + np.repeat(start[:-1][order], count)
    index = np.minimum(index, step.uses.n - 1)  # parts may have more uses than the op; overwritten below
    storage, how = step.uses.storage[index], step.uses.mode[index]
    for row, part in rows.items():
        at = slice(new_start[row], new_start[row + 1])
        storage[at], how[at] = [each for each, _ in part.uses], [each for _, each in part.uses]
    for row, changed in patches.items():
        at = slice(new_start[row], new_start[row + 1])
        storage[at] = [changed.get(each, each) for each in storage[at].tolist()]
    return Uses(op=np.repeat(np.arange(len(order), dtype=np.int32), count), storage=storage, mode=how)
