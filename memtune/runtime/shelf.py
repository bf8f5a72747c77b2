"""Saved activations on their way to SSD and back, so that few of them are in host memory at any time.

Rule 1. A tensor's write begins when its copy to the host has landed. `WRITES` tensors are being written at most: before another
        one begins, the oldest is finished, and its host memory is free.
Rule 2. The first tensor that backward fetches finishes all writes.
Rule 3. A fetch reads its tensor, unless that was read ahead, and then tops up what is read ahead to `ahead` tensors, taking those
        that left last and still live: backward asks in about the opposite order.

None of it depends on timing, so the pass `passes.move` says at which op each tensor is where.
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
        self._shelved: list[weakref.ref[Entry]] = []  # in the order in which they left
        self._read: list[weakref.ref[Entry]] = []

    def put(self, entry: Entry) -> None:
        """Begin to write `entry`, whose copy to the host has landed (Rule 1)."""
        if len(self._writing) == WRITES:
            self._finish_oldest()
        host, ssd = entry.shelve()
        self.written_bytes += host.nbytes
        self._writing.append((ssd, host))
        self._shelved = [each for each in self._shelved if each() is not None]
        self._shelved.append(weakref.ref(entry))

    def take(self, entry: Entry) -> None:
        """See to it that `entry` is read, or being read, into host memory (Rules 2 and 3)."""
        while self._writing:
            self._finish_oldest()
        mine = weakref.ref(entry)  # equal to other references to the same living entry
        self._read = [each for each in self._read if each() is not None]
        if mine in self._read:
            self._read.remove(mine)
        else:
            self._shelved.remove(mine)
            entry.read()
        while self._shelved and len(self._read) < self.ahead:
            last = self._shelved.pop()
            if (found := last()) is not None:
                found.read()
                self._read.append(last)

    def _finish_oldest(self) -> None:
        ssd, _ = self._writing.pop(0)
        transfer.written(ssd)
