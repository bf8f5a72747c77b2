"""The pass of `runtime.store` where gradients are another mechanism's: weights of some blocks come and go, nothing else.

The optimizer's step takes gradients down and updates the host's weights (`passes.host_optimizer`, which runs next and is told
not to bring these up).
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.pieces import Pieces, in_blocks
from memtune.passes.stream import first_ops, insert, stay
from memtune.passes.turns import turns_of
from memtune.program import FOREVER, I32, Kind, Phase, Step, Tier
from memtune.residency import Residency


def streamed_parameters(step: Step, blocks: Container[int]) -> I32:
    """Parameters whose weights come and go, in the order in which the blocks are used."""
    mine, block = in_blocks(step), columns_of(step.parameters).block
    return np.asarray([each for each in mine.tolist() if int(block[each]) in blocks], np.int32)


def stream_weights(step: Step, residency: Residency, blocks: Container[int]) -> Step:
    """`step` with the weights of `blocks` on the device only while `residency` says so.

    Args:
        step: One that `passes.stream.not_in_layers` has nothing to say about.
        residency: Which block is on the device when; what it says of others does not count.
        blocks: Those whose weights come and go.
    """
    columns, mine = columns_of(step.parameters), streamed_parameters(step, blocks)
    pieces, edit = Pieces.of_parameters(step, mine), Edit(step)
    end = int(np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1])
    begins = np.append(first_ops(step), np.int32(end + 1)).astype(np.int32)
    edit.bytes[columns.storage[mine]] = 0
    frozen = mine[columns.gradient[mine] < 0]  # the optimizer has host copies of the others
    nowhere, forever = np.full(len(frozen), -1, np.int32), np.full(len(frozen), FOREVER, np.int32)
    edit.add_storages(
        (columns.numel * columns.itemsize)[frozen], producer=nowhere, tier=Tier.HOST, kind=Kind.PARAMETER, held_until=forever,
        owner=frozen,
    )  # fmt: skip
    turns = turns_of(step, pieces, residency, ((),) * len(begins))
    rows = insert(edit, step, pieces, turns, begins)
    _, drop = turns.starts(rows, begins)
    stay(edit, step, pieces, residency, turns, rows, drop)
    return edit.done()
