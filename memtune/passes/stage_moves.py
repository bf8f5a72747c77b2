"""Where the copies of saved activations stand in the rows of one rank of a pipeline: the mirror of `runtime.slots`.

`passes.move` has written the copies of one micro-batch, all of a stage's copies back before its backward. Here they are put into
the slots of the schedule, by Rules 1 to 3 of `runtime.slots`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np

from memtune.passes.unroll import Rows
from memtune.pipeline_order import Action
from memtune.program import I32, Phase, Step

_OUT, _BACK = "memtune.to_host.default", ("memtune.to_device.default", "memtune.to_device_beside.default")


class SlotMoves:
    """The copies of one rank.

    Args:
        step: One micro-batch with all stages.
        stage: (n,) of each op.
        actions: What the rank runs, in order.
    """

    def __init__(self, step: Step, stage: I32, actions: Sequence[Action]) -> None:
        self._step, self._stage = step, stage
        self._next = dict(pairwise(actions))
        named = {name: row for row, name in enumerate(step.names)}
        self._out = (step.op_name == named.get(_OUT, -1)) & (step.op_phase == Phase.FORWARD)
        self._back = np.isin(step.op_name, [named.get(each, -1) for each in _BACK]) & (step.op_phase == Phase.BACKWARD)
        self._late: deque[tuple[tuple[Hashable, int], int]] = deque()

    def begins(self, rows: Rows, action: Action) -> None:
        """Rule 3: what the backward in the slot after this one asks for comes back."""
        following = self._next.get(action)
        if following is not None and following.backward:
            if action.backward:
                self._all_arrive(rows)
            ops = np.flatnonzero(self._back & (self._stage == following.stage)).astype(np.int32)
            if len(ops):
                rows.take(ops, (following.stage, following.micro_batch), backward=True)

    def without(self, ops: I32) -> I32:
        """`ops` of a backward without the copies back, which have come before."""
        found: I32 = ops[~self._back[ops]]
        return found

    def ends(self, rows: Rows, action: Action, ops: I32, first_row: int) -> None:
        """Rules 1 and 2: until when the sources stay.

        Args:
            rows: Their last row is the slot's last.
            action: What ran.
            ops: What was taken for it, ascending, one row each from `first_row` on.
            first_row: See `ops`.
        """
        leaving: list[tuple[tuple[Hashable, int], int]] = []
        for op in ops[self._out[ops]].tolist():
            if self._late:
                rows.hold(*self._late.popleft(), first_row + int(np.searchsorted(ops, op)) - 1)
            (source,) = self._step.use_storage[self._step.use_op == op].tolist()
            leaving.append(((action.stage, action.micro_batch), source))
        self._all_arrive(rows)
        self._late.extend(leaving)

    def _all_arrive(self, rows: Rows) -> None:
        while self._late:
            rows.hold(*self._late.popleft(), rows.n_ops - 1)
