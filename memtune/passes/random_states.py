"""What the runtime keeps of the random numbers that an op drew which runs again: the state of the CPU's generator, on the host.

Of a block that runs again and draws: the state it began with and that after each of its ops that draws and does not run again
itself. Of a block that draws nothing the state is looked at while its forward runs, one at a time; that is not counted.

Where it is decided online who runs again, every op that draws leaves its state (`states_online`).

A GPU's generator adds 16 bytes to each, which are left out: a Step does not say which device it is for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.program import I32, OWN_GENERATOR, Kind, Phase, Step, Tier

Mask = npt.NDArray[np.bool_]

STATE_BYTES = 5_056
"""Of `torch.get_rng_state()`: a Mersenne twister of 624 words and what the format of before has beside it."""


def states_of(draws: Mask, again: Mask, first: I32) -> dict[str, npt.NDArray[Any]]:
    """Storage columns: a state from an op's first run to its last, and while it runs again the one of now, which is put aside.

    Args:
        draws: (n,) ops that draw random numbers.
        again: (n,) ops that have run before.
        first: (n,) op that each is a run of.
    """
    rows = np.flatnonzero(draws & again).astype(np.int32)
    began, place = np.unique(first[rows], return_inverse=True)
    last = np.full(len(began), -1, np.int32)
    np.maximum.at(last, place, rows)
    count = len(began) + len(rows)
    return {
        "bytes": np.full(count, STATE_BYTES, np.int64), "tier": np.full(count, Tier.HOST, np.uint8),
        "kind": np.full(count, Kind.TEMPORARY, np.uint8), "owner": np.full(count, -1, np.int32),
        "ready_after": np.full(count, -1, np.int32), "producer": np.concatenate([began, rows]).astype(np.int32),
        "held_until": np.concatenate([last, rows]).astype(np.int32),
    }  # fmt: skip


def states_online(step: Step) -> Step:
    """`step`, whose ops run by a schedule, with the states that are kept where it is decided while they run who runs again.

    An upper bound: each op that draws leaves one, until backward is over at the latest (it goes with what the op has made), and
    any of them may run again, for which the state of now is put aside.
    """
    draws = np.flatnonzero((step.op_rng > 0) & (step.op_copy_of < 0) & (step.op_phase < Phase.BOUNDARY)).astype(np.int32)
    if not len(draws):
        return step
    last = np.int32(np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1])
    there = np.isin(step.producer, draws) & (step.tier == Tier.HOST) & (step.bytes == STATE_BYTES)
    there = np.flatnonzero(there & (step.held_until > step.producer)).astype(np.int32)  # not what is put aside
    edit = Edit(step)
    edit.hold_through(there, np.full(len(there), last, np.int32))
    own = draws[step.op_rng[draws] == OWN_GENERATOR]  # whose state is kept beside torch's
    more = np.concatenate([np.setdiff1d(draws, step.producer[there]), own, draws[:1]]).astype(np.int32)
    _add(edit, more, np.full(len(more), last, np.int32))
    return edit.done()


def keep_states(edit: Edit, step: Step, forward: Mask, dropped: tuple[Mask, I32], stays: tuple[Mask, I32]) -> None:
    """Add what blocks that run again keep of the random numbers that they draw.

    Args:
        edit: Of `step`.
        step: Whose blocks run once each.
        forward: (n,) ops of their forwards.
        dropped: (n,) ops after which the state is kept until their block's forward is over, and (blocks,) its last op.
        stays: (n,) those after which it is kept with the one that the block began with, and (blocks,) the op until which.
    """
    rows = np.flatnonzero(forward & (step.op_rng == 1)).astype(np.int32)
    if not len(rows):
        return
    every = np.flatnonzero(forward).astype(np.int32)
    blocks, at = np.unique(step.op_block[every], return_index=True)
    drawn = np.isin(blocks, step.op_block[rows])
    _add(edit, every[at[drawn]], stays[1][blocks[drawn]])
    for these, until in (dropped, stays):
        mine = rows[these[rows]]
        _add(edit, mine + np.int32(1), until[step.op_block[mine]])  # there when the next op runs


def put_aside(edit: Edit, step: Step, ops: I32, new_op: I32) -> None:
    """Add the state of now of each block that draws, while it runs again.

    Args:
        edit: Of `step`.
        step: Whose blocks run once each.
        ops: Those that run again, ascending.
        new_op: (n,) where they do.
    """
    draws = (step.op_phase == Phase.FORWARD) & (step.op_rng == 1)
    mine = ops[np.isin(step.op_block[ops], step.op_block[draws])]
    _, first = np.unique(step.op_block[mine], return_index=True)
    blocks, last = np.unique(step.op_block[mine][::-1], return_index=True)
    if len(blocks):
        _add(edit, new_op[mine[first]], new_op[mine[::-1][last]])


def _add(edit: Edit, producer: I32, until: I32) -> None:
    if len(producer):
        states = edit.add_storages(np.full(len(producer), STATE_BYTES, np.int64), producer=producer, tier=Tier.HOST)
        edit.hold_through(states, until)
