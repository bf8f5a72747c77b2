"""Pass that adds to a Step the random states that recompute keeps on the host: CPU generator states of 5,056
bytes.

A block that runs again and draws keeps the state it began with, and the state after each of its ops that
draws and is not run again. A block that draws nothing drops its state at the end of its forward; that is not
counted. If ops are evicted online, every op that draws keeps its state (`states_online`).

A GPU generator's state adds 16 bytes to each, which are not counted, because a Step does not name its device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.program import I32, OWN_GENERATOR, Edit, Kind, Phase, Step, Tier

Mask = npt.NDArray[np.bool_]

STATE_BYTES = 5_056
"""Bytes of `torch.get_rng_state()`: a Mersenne twister of 624 words, and the fields of the legacy format."""


def states_of(draws: Mask, again: Mask, first: I32) -> dict[str, npt.NDArray[Any]]:
    """Return the storage columns of the random states of second runs.

    For each op a state from its first run to its last, and during a second run the current state, saved.

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
        "bytes": np.full(count, STATE_BYTES, np.int64),
        "tier": np.full(count, Tier.HOST, np.uint8),
        "kind": np.full(count, Kind.TEMPORARY, np.uint8),
        "owner": np.full(count, -1, np.int32),
        "grad_ready_after": np.full(count, -1, np.int32),
        "float_bytes": np.zeros(count, np.uint8),
        "producer": np.concatenate([began, rows]).astype(np.int32),
        "held_until": np.concatenate([last, rows]).astype(np.int32),
    }


def states_online(step: Step) -> Step:
    """Return `step`, whose ops run by a schedule, with the random states that online eviction keeps."""
    # This is an upper bound: each op that draws keeps a state until backward is over at the latest (it
    # is freed with the op's outputs). Any of them may run again, so the current state is saved as well.
    draws = np.flatnonzero(
        (step.ops.rng > 0) & (step.ops.copy_of < 0) & (step.ops.phase < Phase.BOUNDARY)
    ).astype(np.int32)
    if not len(draws):
        return step
    last = np.int32(step.backward_end)
    there = (
        np.isin(step.storages.producer, draws)
        & (step.storages.tier == Tier.HOST)
        & (step.storages.bytes == STATE_BYTES)
    )
    # A state that ends with its producer is one saved around a second run.
    there = np.flatnonzero(there & (step.storages.held_until > step.storages.producer)).astype(np.int32)
    edit = Edit(step)
    edit.hold_through(there, int(last))
    own = draws[step.ops.rng[draws] == OWN_GENERATOR]  # keeps the user's generator state as well as torch's
    more = np.concatenate([np.setdiff1d(draws, step.storages.producer[there]), own, draws[:1]]).astype(
        np.int32
    )
    _add(edit, more, np.full(len(more), last, np.int32))
    return edit.done()


def keep_states(
    edit: Edit, step: Step, forward: Mask, dropped: tuple[Mask, I32], lasting: tuple[Mask, I32]
) -> None:
    """Add the random states that blocks that run again and draw keep.

    Args:
        edit: Edit of `step`.
        step: A Step in which each block runs once.
        forward: (n,) ops of the blocks' forwards.
        dropped: (n,) ops whose state is kept until their block's forward ends, and (blocks,) its last op.
        lasting: (n,) ops whose state is kept with the one that the block began with, and (blocks,) the last
            op that needs it.
    """
    rows = np.flatnonzero(forward & (step.ops.rng == 1)).astype(np.int32)
    if not len(rows):
        return
    every = np.flatnonzero(forward).astype(np.int32)
    blocks, at = np.unique(step.ops.block[every], return_index=True)
    drawn = np.isin(blocks, step.ops.block[rows])
    _add(edit, every[at[drawn]], lasting[1][blocks[drawn]])
    for these, until in (dropped, lasting):
        mine = rows[these[rows]]
        _add(edit, mine + np.int32(1), until[step.ops.block[mine]])  # exists from the next op on


def put_aside(edit: Edit, step: Step, ops: I32, new_op: I32) -> None:
    """Save the current random state of each block that draws during its second run, `new_op` of `ops`.

    Args:
        edit: Edit of `step`.
        step: A Step in which each block runs once.
        ops: Ops that run again, ascending.
        new_op: (n,) row of each second run.
    """
    draws = (step.ops.phase == Phase.FORWARD) & (step.ops.rng == 1)
    mine = ops[np.isin(step.ops.block[ops], step.ops.block[draws])]
    _, first = np.unique(step.ops.block[mine], return_index=True)
    blocks, last = np.unique(step.ops.block[mine][::-1], return_index=True)
    if len(blocks):
        _add(edit, new_op[mine[first]], new_op[mine[::-1][last]])


def _add(edit: Edit, producer: I32, until: I32) -> None:
    if len(producer):
        states = edit.add_storages(
            np.full(len(producer), STATE_BYTES, np.int64), producer=producer, tier=Tier.HOST
        )
        edit.hold_through(states, until)
