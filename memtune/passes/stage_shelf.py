"""Until when host memory is held by what a rank of a pipeline writes to SSD: the mirror of `runtime.shelf`, Rules 1, 2 and 4.

`passes.move` has put writes and reads into one micro-batch. Which write finishes an earlier one is known where the micro-batches
of all stages of a rank stand in the order of the schedule.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from memtune import read_ahead
from memtune.passes.unroll import Key, Rows
from memtune.pipeline_order import Action
from memtune.program import I32, Phase, Step, Tier

_WRITE, _READ = "memtune.to_ssd.default", "memtune.from_ssd.default"


class StageShelf:
    """What one rank writes.

    Args:
        step: One micro-batch with all stages.
    """

    def __init__(self, step: Step) -> None:
        self._host: dict[int, int] = {}
        """Write → what it is written from."""
        self._writing: deque[tuple[Key, int]] = deque()
        if _WRITE not in step.names:
            return
        named = {name: row for row, name in enumerate(step.names)}
        write = (step.op_name == named[_WRITE]) & (step.op_phase == Phase.FORWARD)
        read = (step.op_name == named.get(_READ, -1)) & (step.op_phase == Phase.BACKWARD)
        by_write = write[step.use_op] & (step.tier[step.use_storage] == Tier.HOST)
        self._host = dict(zip(step.use_op[by_write].tolist(), step.use_storage[by_write].tolist(), strict=True))
        shelved = (step.producer >= 0) & write[step.producer]
        self._reads = np.unique(step.use_op[read[step.use_op] & shelved[step.use_storage]])

    def ends(self, rows: Rows, action: Action, ops: I32) -> None:
        """A forward or backward has been written down, from its `ops`."""
        if not self._host:
            return
        key = action.stage, action.micro_batch
        if action.backward:
            reads = ops[np.isin(ops, self._reads)]
            while len(reads) and self._writing:
                self._finish_oldest(rows, key, reads[:1])
            return
        for op in ops[np.isin(ops, list(self._host))].tolist():
            if len(self._writing) == read_ahead.WRITES:
                self._finish_oldest(rows, key, np.array([op], np.int32))
            self._writing.append((key, self._host[op]))

    def _finish_oldest(self, rows: Rows, key: Key, op: I32) -> None:
        """Just before `op` of `key`."""
        rows.hold(*self._writing.popleft(), int(rows.rows_of(key, op)[0]) - 1)
