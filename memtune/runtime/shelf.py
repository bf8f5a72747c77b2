"""Saved activations on their way to SSD and back, so that few of them are in host memory at any time.

Rule 1. A tensor's write begins when its copy to the host has landed. `WRITES` tensors are being written at most: before another
        one begins, the oldest is finished, and its host memory is free.
Rule 2. The first tensor that backward fetches finishes all writes.
Rule 3. A fetch reads its tensor, unless that was read ahead, and then tops up what is read ahead to `ahead` tensors, taking those
        that left last and still live: backward asks in about the opposite order.

None of it depends on timing, so the pass `passes.move` says at which op each tensor is where; on stages `passes.stage_shelf` says
when writes are over.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from memtune.read_ahead import WRITES
from memtune.runtime import transfer
from memtune.runtime.moved import Entry


class Shelf:
    """Follows the rules above for the entries of one activation table.

    Args:
        ahead: How many tensors are read before backward asks for them.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.written_bytes = 0
        self._writing: list[tuple[Tensor, Tensor]] = []  # (on SSD, on the host)
        self._forward = 0  # how many forwards of a stage have ended
        self._shelved: list[tuple[int, weakref.ref[Entry]]] = []  # with their forwards, in the order in which they left
        self._read: list[tuple[int, weakref.ref[Entry]]] = []

    def put(self, entry: Entry) -> None:
        """Begin to write `entry`, whose copy to the host has landed (Rule 1)."""
        if len(self._writing) == WRITES:
            self._finish_oldest()
        host, ssd = entry.shelve()
        self.written_bytes += host.nbytes
        self._writing.append((ssd, host))
        self._shelved = [each for each in self._shelved if each[1]() is not None]
        self._shelved.append((self._forward, weakref.ref(entry)))

    def forward_ends(self) -> None:
        """The forward of a stage of a pipeline has ended, and all that left in it was put here (Rule 4)."""
        self._forward += 1

    def take(self, entry: Entry) -> None:
        """See to it that `entry` is read, or being read, into host memory (Rules 2 and 3)."""
        while self._writing:
            self._finish_oldest()
        self._read = [each for each in self._read if each[1]() is not None]
        if (mine := _of(entry, self._read)) is not None:
            self._read.remove(mine)
        else:
            mine = _of(entry, self._shelved)
            assert mine is not None
            self._shelved.remove(mine)
            entry.read()
        beside = [each for each in self._shelved if each[0] == mine[0]]
        while beside and len(self._read) < self.ahead:
            last = beside.pop()
            self._shelved.remove(last)
            if (found := last[1]()) is not None:
                found.read()
                self._read.append(last)

    def _finish_oldest(self) -> None:
        ssd, _ = self._writing.pop(0)
        transfer.written(ssd)


def _of(entry: Entry, among: list[tuple[int, weakref.ref[Entry]]]) -> tuple[int, weakref.ref[Entry]] | None:
    """The one of `among` that is `entry`'s."""
    return next((each for each in among if each[1]() is entry), None)
