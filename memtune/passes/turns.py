"""What `passes.stream` inserts when each moment of a step begins, as columns.

They follow from when which piece comes in, not from the ops of the step, so steps whose blocks come and go alike share them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memtune.parameters import columns_of
from memtune.passes.pieces import Pieces
from memtune.program import I32, Resource, Step
from memtune.residency import Residency, Units, reads_ahead

ADD, ALLOCATE, COPY, AHEAD, UPDATE, READ = range(6)
OPS = (
    ("aten.add_.Tensor", Resource.HOST_THREADS),
    ("memtune.allocate", Resource.NOTHING),
    ("memtune.copy_to_device_.default", Resource.HOST_TO_DEVICE),
    ("memtune.copy_to_device_.default", Resource.HOST_TO_DEVICE),
    ("memtune.host_update_.default", Resource.HOST_THREADS),
    ("memtune.from_ssd.default", Resource.SSD_READ),
)
"""Name and resource of each sort. AHEAD comes in before it is used, COPY in the moment that uses it; READ: SSD to host."""
_REMEMBERED = 64


@dataclass(frozen=True, eq=False)
class Turns:
    """Ops that are inserted, one row each, in the order of the moments."""

    what: I32
    row: I32
    """A piece's, of an UPDATE a parameter's, of an ADD a landing's."""
    moment: I32

    @cached_property
    def loads(self) -> npt.NDArray[np.bool_]:
        """Which of them are copies to the device."""
        found: npt.NDArray[np.bool_] = (self.what == COPY) | (self.what == AHEAD)
        return found

    @cached_property
    def reads(self) -> npt.NDArray[np.bool_]:
        """Which of them are reads from SSD."""
        found: npt.NDArray[np.bool_] = self.what == READ
        return found

    def starts(self, rows: I32, begins: I32) -> tuple[I32, I32]:
        """(moments,) the op before which each moment lets go of the gradient on its way, and of parameters.

        Args:
            rows: Where the ops were inserted.
            begins: The step's own op before which each moment begins.
        """
        land, drop = begins.copy(), begins.copy()
        land[self.moment[::-1]] = rows[::-1]  # the first one is written last
        others = np.flatnonzero(self.what != ADD)[::-1]
        drop[self.moment[others]] = rows[others]
        return land, drop


def turns_of(
    step: Step, pieces: Pieces, residency: Residency, adds: tuple[Units, ...], *, allocates: bool = True,
    updated: tuple[Units, ...] = (), read_ahead: int | None = None,
) -> Turns:  # fmt: skip
    """What runs when each moment begins, in the order of the rules of `runtime.store`.

    Args:
        step: Whose blocks come and go.
        pieces: What comes and goes of them.
        residency: When.
        adds: (moments,) the landings whose gradients are added when the moment begins.
        allocates: Whether what comes in is allocated then.
        updated: (moments,) blocks that are updated when the moment begins; none given: no block is.
        read_ahead: Moments by which what comes in is read from SSD before that; None where it is on the host.
    """
    trained = _trained_by_block(step) if updated else ()
    updates = tuple(tuple(row for block in blocks for row in trained[block]) for blocks in updated)
    reads = () if read_ahead is None else reads_ahead(residency, read_ahead)
    return _turns(pieces.of_unit, pieces.used, residency.loads, adds, updates, allocates, reads)


@functools.lru_cache(maxsize=_REMEMBERED)
def _turns(
    of_unit: tuple[Units, ...], used: tuple[Units, ...], loads: tuple[Units, ...], adds: tuple[Units, ...],
    updates: tuple[Units, ...], allocates: bool, reads: tuple[tuple[Units, Units], ...],
) -> Turns:  # fmt: skip
    found: list[tuple[int, int, int]] = []
    for moment, units in enumerate(loads):
        found += [(ADD, row, moment) for row in adds[moment]]
        now, later = reads[moment] if reads else ((), ())
        for unit in units:
            what = COPY if unit in used[moment] else AHEAD
            found += [(READ, row, moment) for row in of_unit[unit]] if unit in now else []
            for row in of_unit[unit]:
                found += [(ALLOCATE, row, moment), (what, row, moment)] if allocates else [(what, row, moment)]
        found += [(READ, row, moment) for unit in later for row in of_unit[unit]]
        found += [(UPDATE, row, moment) for row in updates[moment]] if updates else []
    what_of, row_of, moment_of = np.asarray(found, np.int32).reshape(-1, 3).T
    return Turns(np.ascontiguousarray(what_of), np.ascontiguousarray(row_of), np.ascontiguousarray(moment_of))


@functools.lru_cache(maxsize=8)
def _trained_by_block(step: Step) -> tuple[Units, ...]:
    columns = columns_of(step.parameters)
    trained = np.where(columns.gradient >= 0, columns.block, -1)
    return tuple(tuple(np.flatnonzero(trained == i).tolist()) for i in range(len(step.blocks)))


@functools.lru_cache(maxsize=4)
def dropped_in(drops: tuple[Units, ...], units: int) -> I32:
    """(units, moments) the moment that drops each unit when it was brought in in an earlier one, -1 for none."""
    until = np.full((units, len(drops)), -1, np.int32)
    for moment in reversed(range(len(drops))):
        until[list(drops[moment]), :moment] = moment
    return until
