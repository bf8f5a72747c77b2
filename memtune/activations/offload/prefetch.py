"""Prefetches saved activations from the host before backward reads them, overlapped with compute.

Each read tops up the prefetched tensors to `count`, taking the tensors that were offloaded last and still
live: backward reads in about the reverse order. Blocks that run again read their own tensors in the order of
forward, so of the call offloaded last the first tensor comes first. None of it depends on timing, so
`activations.offload.activation_offload_pass` predicts the op at which each prefetch starts.
"""

from __future__ import annotations

import weakref

from memtune.activations.offload.offloaded_tensor import SavedStorage


class Prefetcher:
    """Prefetches the entries of one activation table.

    Args:
        count: Number of tensors to prefetch.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._gone: list[weakref.ref[SavedStorage]] = []  # what comes next is last
        self._call, self._of_call = 0, 0  # the call that left last, and where in `_gone` what it left begins
        self._came: list[weakref.ref[SavedStorage]] = []

    def left(self, entry: SavedStorage, call: int, *, runs_again: bool) -> None:
        """Note that call `call` of a block, which may run again in backward, offloads `entry`."""
        if not self.count:
            return
        if call != self._call or not runs_again:
            self._gone = [each for each in self._gone if each() is not None]
            self._call, self._of_call = call, len(self._gone)
        self._gone.insert(self._of_call, weakref.ref(entry))

    def bring(self, entry: SavedStorage) -> None:
        """Reload `entry`, which backward reads, unless it is prefetched; prefetch others."""
        mine = weakref.ref(entry)  # equal to other references to the same living entry
        self._came = [each for each in self._came if each() is not None]
        if mine in self._came:
            self._came.remove(mine)
            self._top_up()
            entry.is_there()
            return
        if mine in self._gone:
            self._gone.remove(mine)
        entry.come_back()
        self._top_up()

    def _top_up(self) -> None:
        while self._gone and len(self._came) < self.count:
            last = self._gone.pop()
            if (found := last()) is not None:
                found.come_ahead()
                self._came.append(last)
