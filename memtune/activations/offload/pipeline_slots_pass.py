"""Pass of `activations.offload.pipeline_slots`: places the copies of saved activations in the rows of one
rank.

`activations.offload.activation_offload_pass` has inserted the copies of one micro-batch, with all reloads of
a stage before its backward. This pass moves them into the slots of the schedule by Rules 1 to 3 of
`activations.offload.pipeline_slots`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np

from memtune.program import I32, Key, Phase, StageAction, Step, Tier, UnrolledRows, residency

_OUT, _BACK = "memtune.to_host.default", ("memtune.to_device.default", "memtune.to_device_with_tail.default")


class SlotMoves:
    """Activation copies of one rank.

    Args:
        step: One micro-batch with all stages.
        stage: (n,) stage of each op.
        actions: Forwards and backwards of the rank, in order.
    """

    def __init__(self, step: Step, stage: I32, actions: Sequence[StageAction]) -> None:
        self._step, self._stage = step, stage
        self._next = dict(pairwise(actions))
        named = {name: row for row, name in enumerate(step.names)}
        self._out = (step.ops.name == named.get(_OUT, -1)) & (step.ops.phase == Phase.FORWARD)
        self._back = np.isin(step.ops.name, [named.get(each, -1) for each in _BACK]) & (
            step.ops.phase == Phase.BACKWARD
        )
        self._completing: deque[tuple[tuple[Hashable, int], int]] = deque()

    def begins(self, rows: UnrolledRows, action: StageAction) -> None:
        """Insert the reloads for the backward in the slot after this one (Rule 3)."""
        following = self._next.get(action)
        if following is not None and following.backward:
            if action.backward:
                self._complete_all(rows)
            ops = np.flatnonzero(self._back & (self._stage == following.stage)).astype(np.int32)
            if len(ops):
                rows.append_ops(ops, (following.stage, following.micro_batch), backward=True)

    def without_reloads(self, ops: I32) -> I32:
        """Return `ops` of a backward without the reloads, which the slot before has inserted."""
        found: I32 = ops[~self._back[ops]]
        return found

    def ends(self, rows: UnrolledRows, action: StageAction, ops: I32, first_row: int) -> None:
        """Hold the sources of the copies of the slot with these `ops`, one row each (Rules 1 and 2)."""
        started: list[tuple[tuple[Hashable, int], int]] = []
        for op in ops[self._out[ops]].tolist():
            if self._completing:
                # Up to the row before the copy: it waits for the oldest one, whose source is free then.
                rows.hold(*self._completing.popleft(), first_row + int(np.searchsorted(ops, op)) - 1)
            (source,) = self._step.uses.storage[self._step.uses.op == op].tolist()
            started.append(((action.stage, action.micro_batch), source))
        self._complete_all(rows)
        self._completing.extend(started)

    def _complete_all(self, rows: UnrolledRows) -> None:
        while self._completing:
            rows.hold(*self._completing.popleft(), rows.n_ops - 1)


_WRITE, _READ = "memtune.to_ssd.default", "memtune.from_ssd.default"


class StageSpill:
    """Host memory of one rank's SSD writes, held until each write completes, as
    `activations.offload.ssd_spill` does.

    Args:
        step: One micro-batch with all stages.
    """

    def __init__(self, step: Step) -> None:
        self._host: dict[int, int] = {}
        """Write → the host storage it reads."""
        self._writing: deque[tuple[Key, int]] = deque()
        if _WRITE not in step.names:
            return
        named = {name: row for row, name in enumerate(step.names)}
        write = (step.ops.name == named[_WRITE]) & (step.ops.phase == Phase.FORWARD)
        read = (step.ops.name == named.get(_READ, -1)) & (step.ops.phase == Phase.BACKWARD)
        by_write = write[step.uses.op] & (step.storages.tier[step.uses.storage] == Tier.HOST)
        self._host = dict(
            zip(step.uses.op[by_write].tolist(), step.uses.storage[by_write].tolist(), strict=True)
        )
        spilled = (step.storages.producer >= 0) & write[step.storages.producer]
        self._reads = np.unique(step.uses.op[read[step.uses.op] & spilled[step.uses.storage]])

    def ends(self, rows: UnrolledRows, action: StageAction, ops: I32) -> None:
        """Add the writes and reads of a forward or backward whose rows have been added from `ops`."""
        if not self._host:
            return
        key = action.stage, action.micro_batch
        if action.backward:
            reads = ops[np.isin(ops, self._reads)]
            while len(reads) and self._writing:
                self._finish_oldest(rows, key, reads[:1])
            return
        for op in ops[np.isin(ops, list(self._host))].tolist():
            # The drive works on so many at once; a further one waits for the oldest.
            if len(self._writing) == residency.WRITES_IN_FLIGHT:
                self._finish_oldest(rows, key, np.array([op], np.int32))
            self._writing.append((key, self._host[op]))

    def _finish_oldest(self, rows: UnrolledRows, key: Key, op: I32) -> None:
        """Hold the oldest write's host memory until just before `op` of `key`."""
        rows.hold(*self._writing.popleft(), int(rows.rows_of(key, op)[0]) - 1)
