"""Spill of saved activations from host memory to SSD, so that host memory holds few of them at any time.

Rule 1. The write of a tensor begins when its copy to the host is complete. At most `WRITES_IN_FLIGHT` tensors
are being written: before another write begins, the oldest is completed and its host memory freed.

Rule 2. The first tensor that backward fetches completes all writes.

Rule 3. A fetch reads its tensor unless it was read ahead, then tops up the tensors being read ahead to the
limit, with those that were offloaded last and still live: backward reads in about the reverse order.

Rule 4. On pipeline stages the tensors of all micro-batches in flight are spilled, each until its own
backward: only tensors of the same forward are read ahead, and writes that one forward has begun overlap with
the next.

Nothing depends on timing, so `activations.offload.activation_offload_pass` predicts the tier of each tensor
at each op; on pipeline stages `activations.offload.pipeline_slots_pass` predicts when writes complete.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from memtune.activations.offload.offloaded_tensor import SavedStorage
from memtune.program import WRITES_IN_FLIGHT
from memtune.ssd import ssd_tensors


class SSDSpill:
    """Spiller of the entries of one activation table.

    Args:
        read_ahead: Number of tensors to read ahead of backward.
    """

    def __init__(self, read_ahead: int) -> None:
        self.read_ahead = read_ahead
        self.written_bytes = 0
        self._writing: list[tuple[Tensor, Tensor]] = []  # (on SSD, on the host)
        self._forward = 0  # number of a stage's forwards that have ended
        # Number of the forward and entry, in order of their offload.
        self._spilled: list[tuple[int, weakref.ref[SavedStorage]]] = []
        self._read: list[tuple[int, weakref.ref[SavedStorage]]] = []

    def start_write(self, entry: SavedStorage) -> None:
        """Start the write of `entry`, whose copy to the host is complete (Rule 1)."""
        if len(self._writing) == WRITES_IN_FLIGHT:
            self._finish_oldest()
        host, ssd = entry.spill()
        self.written_bytes += host.nbytes
        self._writing.append((ssd, host))
        self._spilled = [each for each in self._spilled if each[1]() is not None]
        self._spilled.append((self._forward, weakref.ref(entry)))

    def forward_ends(self) -> None:
        """Note the end of a stage's forward, whose tensors have all been written here (Rule 4)."""
        self._forward += 1

    def ensure_read(self, entry: SavedStorage) -> None:
        """Ensure that `entry` is read, or being read, into host memory (Rules 2 and 3)."""
        # Backward begins: its reads would share the drive with the writes, and need their host memory.
        while self._writing:
            self._finish_oldest()
        self._read = [each for each in self._read if each[1]() is not None]
        if (mine := _reference_to(entry, self._read)) is not None:
            self._read.remove(mine)
        else:
            mine = _reference_to(entry, self._spilled)
            assert mine is not None
            self._spilled.remove(mine)
            entry.start_read()
        # Another micro-batch's tensors are needed only after its own backward has begun.
        same_forward = [each for each in self._spilled if each[0] == mine[0]]
        while same_forward and len(self._read) < self.read_ahead:
            last = same_forward.pop()
            self._spilled.remove(last)
            if (found := last[1]()) is not None:
                found.start_read()
                self._read.append(last)

    def _finish_oldest(self) -> None:
        ssd, _ = self._writing.pop(0)
        ssd_tensors.written(ssd)


def _reference_to(
    entry: SavedStorage, among: list[tuple[int, weakref.ref[SavedStorage]]]
) -> tuple[int, weakref.ref[SavedStorage]] | None:
    """Return the reference in `among` to `entry`, or None."""
    return next((each for each in among if each[1]() is entry), None)
