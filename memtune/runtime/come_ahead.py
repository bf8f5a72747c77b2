"""Saved activations that come back from the host before backward asks for them, beside compute.

A tensor that is asked for tops up what has come ahead to `count` tensors, taking those that left last and still live: backward
asks in about the opposite order. Blocks that run again ask for their own in the order of forward, so of what left last the first
tensor of its block's call comes first. None of it depends on timing, so the pass `passes.move` says at which op each comes back.
"""

from __future__ import annotations

import weakref

from memtune.runtime.moved import Entry


class Ahead:
    """Follows the rule above for the entries of one activation table.

    Args:
        count: How many tensors come back before backward asks for them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._gone: list[weakref.ref[Entry]] = []  # what comes next is last
        self._call, self._of_call = 0, 0  # the call that left last, and where in `_gone` what it left begins
        self._came: list[weakref.ref[Entry]] = []

    def left(self, entry: Entry, call: int, *, runs_again: bool) -> None:
        """`entry` is on its way to the host, where it stays; it left in this call of a block, which runs again or not."""
        if not self.count:
            return
        if call != self._call or not runs_again:
            self._gone = [each for each in self._gone if each() is not None]
            self._call, self._of_call = call, len(self._gone)
        self._gone.insert(self._of_call, weakref.ref(entry))

    def bring(self, entry: Entry) -> None:
        """Backward asks for `entry`: it comes back, unless it has, and others with it."""
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
