"""Prefetch of saved activations from the host before backward reads them, overlapped with compute.

Each read tops up the prefetched tensors to `count`, with the tensors that were offloaded last and still live,
because backward reads in about the reverse order. Blocks that run again read their own tensors in the order
of forward, so the first tensor of the call offloaded last is prefetched first. Nothing depends on timing, so
`activations.offload.activation_offload_pass` predicts the op at which each prefetch starts.
"""

from __future__ import annotations

import weakref

from memtune.activations.offload.offloaded_tensor import SavedStorage


class Prefetcher:
    """Prefetcher of the entries of one activation table.

    Args:
        count: Number of tensors to prefetch.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._offloaded: list[weakref.ref[SavedStorage]] = []  # the next one to prefetch is last
        self._call, self._of_call = 0, 0  # the latest offloading call, and the index of its first tensor
        self._prefetched: list[weakref.ref[SavedStorage]] = []

    def note_offload(self, entry: SavedStorage, call: int, *, runs_again: bool) -> None:
        """Note that call `call` of a block, which may run again in backward, offloads `entry`."""
        if not self.count:
            return
        offloaded = self._offloaded
        if call != self._call or not runs_again:
            while offloaded and offloaded[-1]() is None:  # of a graph that was dropped
                offloaded.pop()
            self._call, self._of_call = call, len(offloaded)
        # At the end, or, if the call runs again, before the call's earlier tensors: `pop` then returns these
        # first.
        offloaded.insert(self._of_call, weakref.ref(entry))

    def reload(self, entry: SavedStorage) -> None:
        """Reload `entry`, which backward reads, unless it is prefetched; prefetch others."""
        if not self.count:
            entry.reload()
            return
        mine = weakref.ref(entry)  # weak references to the same live object compare equal
        if entry.is_resident:
            self._prefetched.remove(mine)
            self._top_up()
            entry.complete_prefetch()
            return
        if mine in self._offloaded:
            self._offloaded.remove(mine)
        entry.reload()
        self._top_up()

    def _top_up(self) -> None:
        while self._offloaded:
            if len(self._prefetched) >= self.count:
                self._prefetched = [each for each in self._prefetched if each() is not None]
                if len(self._prefetched) >= self.count:
                    return
            last = self._offloaded.pop()
            if (found := last()) is not None:
                found.prefetch()
                self._prefetched.append(last)
