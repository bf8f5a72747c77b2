"""Orders of ops with few live bytes (`csrc/order`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from memtune import _native
from memtune.program import I32, I64, U8


@dataclass(frozen=True, eq=False)
class Ops:
    """Ops 0 … n-1 in program order, and the storages they touch.

    Legend: m = storages, u = uses, e = pairs of ops. A storage is live from its producer to the last op that
    uses it.
    """

    count: int
    bytes: I64  # (m,)
    producer: I32  # (m,) op that makes it, -1: live from the start
    outlives: U8  # (m,) 1 if it is live to the end
    use_op: I32  # (u,)
    use_storage: I32  # (u,) producers need not be among the uses
    # (e,) op first[i] runs before op then[i], in addition to the order of producers and users
    first: I32
    then: I32

    @classmethod
    def of(
        cls,
        count: int,
        storages: Iterable[tuple[int, int, bool]],
        uses: Iterable[tuple[int, int]],
        pairs: Iterable[tuple[int, int]] = (),
    ) -> Ops:
        """Return the ops of rows (bytes, producer, held), (op, storage) and (first, then)."""
        table = np.array([*storages], np.int64).reshape(-1, 3).T
        used = np.array([*uses], np.int32).reshape(-1, 2).T
        ordered = np.array([*pairs], np.int32).reshape(-1, 2).T
        columns = (table[0], table[1].astype(np.int32), table[2].astype(np.uint8), *used, *ordered)
        return cls(count, *(np.ascontiguousarray(column) for column in columns))


@dataclass(frozen=True, eq=False)
class LowPeak:
    """An order of ops whose peak is at most that of program order."""

    order: I32
    """(n,) ops in the order in which they run."""
    peak_bytes: int
    """Most live bytes while an op of `order` runs."""
    program_peak_bytes: int
    """The same in program order."""


def low_peak_order(ops: Ops) -> LowPeak:
    """Return the order with the least peak for up to 16 ops, and one with a low peak for more; deterministic.

    Raises:
        ValueError: A number is out of range, or a use or pair contradicts program order.
    """
    # From program order, ops that free more than they and the ops they enable allocate are moved up.
    # Then windows of up to 64 ops around the peak are ordered exactly, until none lowers the peak
    # (after Shu et al. 2023, ROAM, which solves leaves of a tree exactly).
    order, peak_bytes, program_peak_bytes = _native.low_peak_order(
        ops.count, ops.bytes, ops.producer, ops.outlives, ops.use_op, ops.use_storage, ops.first, ops.then
    )
    return LowPeak(order, peak_bytes, program_peak_bytes)
