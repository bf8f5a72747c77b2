"""Saved activations that leave and come back in the slots of a pipeline's schedule, each a forward or backward of a micro-batch.

A micro-batch's activations wait on a stage while the forwards and backwards of others run: the link has that time for them.

Rule 1. A tensor starts to leave when it is saved, and has the rest of its slot and all of the next one to arrive; then its memory
        is given back.
Rule 2. In a forward that follows a forward one tensor of the slot before has to have arrived for each that starts to leave, the
        oldest first: what is on its way is never more than one micro-batch's.
Rule 3. All that a backward asks for starts to come back when the slot before it begins, what left last first. Where that slot is
        a backward as well, what is on its way to the host has arrived before: the device holds two micro-batches' at most.

So of a micro-batch's bytes that move, a device holds none in the slots in between; which slots these are follows from the
schedule alone, not from timing. Where there are fewer than two in between (`pipeline_order.slots_between`) nothing is claimed.

Source: Yuan et al. 2024, Accelerating the Training of Large Language Models using Efficient Activation Rematerialization and
Optimal Hybrid Parallelism, USENIX ATC 24, section 4.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from memtune.pipeline_order import Action
from memtune.runtime import transfer
from memtune.runtime.moved import Entry


@dataclass(frozen=True)
class Moment:
    """What happened to the tensors of a micro-batch in a slot."""

    slot: int
    what: Literal["leaves", "arrived", "comes"]
    stage: int
    micro_batch: int
    n_bytes: int


class Slots:
    """The copies of one rank; an activation table asks it where others wait for each tensor by itself."""

    def __init__(self) -> None:
        self.trace: list[Moment] = []
        """Of the step at hand, or the last one."""
        self._next: dict[Action, Action] = {}
        self._clear()

    def _clear(self) -> None:
        self._now: Action | None = None
        self._slot = -1
        self._leaving = deque[tuple[Action, Entry]]()
        self._late = deque[tuple[Action, Entry]]()
        self._gone: dict[tuple[int, int], list[weakref.ref[Entry]]] = {}

    def follow(self, actions: Sequence[Action]) -> None:
        """A step begins, in which this rank runs `actions` in this order."""
        self._next = dict(pairwise(actions))
        self._clear()
        self.trace = []

    def stop(self) -> None:
        """The step has ended, or failed: nothing is on its way any more."""
        while self._late or self._leaving:
            (self._late or self._leaving).popleft()[1].arrive()
        self._clear()

    def begins(self, action: Action) -> None:
        """A slot begins: Rule 3."""
        self._now, self._slot = action, self._slot + 1
        following = self._next.get(action)
        if following is None or not following.backward:
            return
        while self._late and action.backward:
            self._arrives()
        for left in reversed(self._gone.pop((following.stage, following.micro_batch), [])):
            if (entry := left()) is not None:
                self._note("comes", following, entry)
                with transfer.ahead(entry.device):
                    entry.come_back()

    def ends(self) -> None:
        """It has ended: what began to leave in the one before has arrived (Rule 1)."""
        while self._late:
            self._arrives()
        self._late, self._leaving = self._leaving, self._late

    def leave(self, entry: Entry, n_bytes: int) -> None:
        """Start the copy of `n_bytes` of `entry`: Rules 1 and 2."""
        if self._late:
            self._arrives()
        assert self._now is not None
        entry.leave(n_bytes)
        self._leaving.append((self._now, entry))
        self._gone.setdefault((self._now.stage, self._now.micro_batch), []).append(weakref.ref(entry))
        self._note("leaves", self._now, entry)

    def bring(self, entry: Entry) -> None:
        """Backward asks for `entry`, which is on its way back."""
        if not entry.is_back:
            entry.come_back()
        transfer.caught_up(entry.device)

    def _arrives(self) -> None:
        action, entry = self._late.popleft()
        self._note("arrived", action, entry)
        entry.arrive()

    def _note(self, what: Literal["leaves", "arrived", "comes"], action: Action, entry: Entry) -> None:
        self.trace.append(Moment(self._slot, what, action.stage, action.micro_batch, entry.n_bytes))
