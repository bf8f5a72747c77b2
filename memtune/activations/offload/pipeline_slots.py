"""Offload and reload of saved activations in the slots of a pipeline schedule; a slot is a forward or
backward of a micro-batch.

A stage holds a micro-batch's activations while it runs forwards and backwards of other micro-batches; copies
overlap with those.

Rule 1. The offload of a tensor starts when it is saved and completes by the end of the next slot; then its
memory is freed.

Rule 2. In a forward that follows a forward, each offload that starts completes one of the slot before, the
oldest first: at most one micro-batch's bytes are in flight.

Rule 3. The reload of all that a backward reads starts at the beginning of the slot before it, last offloaded
first. If that slot is a backward as well, offloads in flight complete before: the device holds two
micro-batches' activations at most.

In the slots in between, the device holds none of a micro-batch's offloaded bytes. These slots follow from the
schedule, not from timing. If fewer than two slots lie in between (`pipeline_order.slots_between`), no tensor
is claimed.

Source: Yuan et al. 2024, Accelerating the Training of Large Language Models using Efficient Activation
Rematerialization and Optimal Hybrid Parallelism, USENIX ATC 24, section 4.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from memtune.activations.offload.offloaded_tensor import SavedStorage, id_of
from memtune.program import StageAction
from memtune.runtime import transfer


@dataclass(frozen=True)
class Moment:
    """One event of a micro-batch's tensors, for tests and audits."""

    slot: int
    what: Literal["leaves", "arrived", "comes"]
    stage: int
    micro_batch: int
    n_bytes: int


class Slots:
    """Copies of one rank, in the slots of its schedule; replaces `Prefetcher` in an activation table."""

    def __init__(self) -> None:
        self.trace: list[Moment] = []
        """Events of the current step, or of the last one."""
        self._next: dict[StageAction, StageAction] = {}
        self._clear()

    def _clear(self) -> None:
        self._now: StageAction | None = None
        self._slot = -1
        self._started = deque[tuple[StageAction, SavedStorage]]()
        self._completing = deque[tuple[StageAction, SavedStorage]]()
        self._offloaded: dict[tuple[int, int], list[weakref.ref[SavedStorage]]] = {}

    def follow(self, actions: Sequence[StageAction]) -> None:
        """Begin a step in which this rank runs `actions` in this order."""
        self._next = dict(pairwise(actions))
        self._clear()
        self.trace = []

    def stop(self) -> None:
        """Complete all copies in flight, because the step has ended or failed."""
        while self._completing or self._started:
            (self._completing or self._started).popleft()[1].complete_offload()
        self._clear()

    def begins(self, action: StageAction) -> None:
        """Begin the slot of `action`, and reload for the slot after it (Rule 3)."""
        self._now, self._slot = action, self._slot + 1
        following = self._next.get(action)
        if following is None or not following.backward:
            return
        # Two backwards in a row: without this the device would hold a third micro-batch's activations.
        while self._completing and action.backward:
            self._complete_oldest()
        # Backward reads in about the reverse order of forward.
        for left in reversed(self._offloaded.pop((following.stage, following.micro_batch), [])):
            if (entry := left()) is not None:
                self._note("comes", following, entry)
                with transfer.prefetching(entry.device):
                    entry.reload()

    def ends(self) -> None:
        """End the slot, and complete the copies that the slot before it started (Rule 1)."""
        while self._completing:
            self._complete_oldest()
        # Swapped, not joined: the copies of this slot have until the end of the next one.
        self._completing, self._started = self._started, self._completing

    def offload(self, entry: SavedStorage, n_bytes: int) -> None:
        """Start the copy of the first `n_bytes` of `entry` to the host (Rules 1 and 2)."""
        if self._completing:
            self._complete_oldest()
        assert self._now is not None
        entry.offload(n_bytes)
        self._started.append((self._now, entry))
        # Weakly: a tensor that backward has freed already needs no reload.
        self._offloaded.setdefault((self._now.stage, self._now.micro_batch), []).append(weakref.ref(entry))
        self._note("leaves", self._now, entry)

    def reload(self, entry: SavedStorage) -> None:
        """Make the compute stream wait for the reload of `entry`, which backward reads."""
        if not entry.is_resident:
            entry.reload()
        transfer.wait_prefetched(entry.device)

    def _complete_oldest(self) -> None:
        action, entry = self._completing.popleft()
        self._note("arrived", action, entry)
        entry.complete_offload()

    def _note(
        self, what: Literal["leaves", "arrived", "comes"], action: StageAction, entry: SavedStorage
    ) -> None:
        self.trace.append(Moment(self._slot, what, action.stage, action.micro_batch, entry.n_bytes))


class OwnOutputs:
    """Block outputs of a micro-batch's forward through a stage: activations that this rank may offload."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[torch.UntypedStorage]] = []

    def begin(self) -> None:
        """Begin a forward of the stage."""
        self._made = []

    def returned(self, out: Any) -> None:
        """Note the tensors that a block has returned."""
        tensors = (each for each in tree_leaves(out) if isinstance(each, torch.Tensor))
        self._made += [weakref.ref(each.untyped_storage()) for each in tensors]

    def others(self, given: Any) -> frozenset[int]:
        """Return the storages among a block's inputs that no block of the stage has returned."""
        # By storage, because a block may return an input or a view of it.
        own = {id(storage) for made in self._made if (storage := made()) is not None}
        tensors = (each for each in tree_leaves(given) if isinstance(each, torch.Tensor))
        return frozenset(id_of(each) for each in tensors if id(each.untyped_storage()) not in own)
