"""The pass of `runtime.activations`' move claims: what a block saves goes to the host and comes back when backward asks.

It runs after `passes.recompute` and mirrors Rules 2 and 6 there: the same tensors are chosen by the same running sums,
each copy holds its source until the next one starts or the next block ends, and each comes back once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtune.edit import Edit
from memtune.program import FOREVER, I32, I64, Phase, Resource, Step, Tier


@dataclass(frozen=True)
class MoveClaim:
    """What one block gives to the host: a fraction of its claimable bytes, no tensor under `min_bytes`."""

    block: int
    fraction: float
    min_bytes: int = 0


def move_activations(step: Step, claims: list[MoveClaim]) -> Step:
    """`step` with saved activations of the claimed blocks on the host between forward and backward."""
    rows = _chosen_rows(step, claims)
    if not len(rows):
        return step
    storage, block = step.save_storage[rows], step.save_block[rows]
    n_bytes = step.bytes[storage]
    edit = Edit(step)

    leave = edit.add_ops(
        "memtune.to_host.default",
        before=step.save_before[rows],
        phase=Phase.FORWARD,
        resource=Resource.DEVICE_TO_HOST,
        traffic_bytes=n_bytes,
        block=block,
    )
    edit.add_uses(leave, storage)
    host = edit.add_storages(n_bytes, producer=leave, tier=Tier.HOST)
    _hold_sources(edit, step, rows, leave)

    readers = _reader_rows(step, storage, block)  # (uses,) row of `rows` whose storage that backward use reads, -1 others
    moved_save = _shared_saves(step, storage, block)
    first, asked = _first_asked(step, moved_save, len(storage))
    back = _come_back(edit, step, storage, block, first, asked, host)
    edit.use_storage = np.where(readers >= 0, back[readers], edit.use_storage).astype(np.int32)
    # Some saves are let go without ever being asked for.
    edit.drop_saves((moved_save >= 0) & (step.save_until < first[moved_save]))
    edit.save_storage = np.where((moved_save >= 0) & (back[moved_save] >= 0), back[moved_save], edit.save_storage).astype(np.int32)
    return edit.done()


def _chosen_rows(step: Step, claims: list[MoveClaim]) -> I32:
    """First save row of every storage that moves, in the order in which the copies are started."""
    claim_of = {claim.block: claim for claim in claims if claim.fraction > 0}
    recomputed = (step.producer >= 0) & (step.op_phase[step.producer] == Phase.RECOMPUTE)
    claimable = ~recomputed & (step.held_until != FOREVER) & (step.tier == Tier.DEVICE)
    rows = np.flatnonzero((step.save_block >= 0) & claimable[step.save_storage] & (step.save_until >= step.save_before))
    rows = rows[np.lexsort((step.save_block[rows], step.save_before[rows]))]  # a block's end comes before the next one's start
    moved: set[int] = set()
    decided: set[tuple[int, int]] = set()
    seen: dict[int, int] = {}
    gone: dict[int, int] = {}
    chosen: list[int] = []
    for row, storage, block in zip(rows.tolist(), step.save_storage[rows].tolist(), step.save_block[rows].tolist(), strict=True):
        claim = claim_of.get(block)
        if claim is None or storage in moved or (block, storage) in decided:
            continue
        decided.add((block, storage))
        n_bytes = int(step.bytes[storage])
        if n_bytes < max(claim.min_bytes, 1):
            continue
        seen[block] = seen.get(block, 0) + n_bytes
        if gone.get(block, 0) + n_bytes <= claim.fraction * seen[block]:
            gone[block] = gone.get(block, 0) + n_bytes
            moved.add(storage)
            chosen.append(row)
    return np.asarray(chosen, np.int32)


def _hold_sources(edit: Edit, step: Step, rows: I32, leave: I32) -> None:
    """Rule 6: a source stays until just before the next copy, or to the end of the next block's forward.

    An op that saves its own outputs holds all it was given and has made until it has packed the last one.
    """
    storage, block, before = step.save_storage[rows], step.save_block[rows], step.save_before[rows]
    output = step.save_is_output[rows] == 1
    if output.any():
        at = before[output] - 1
        last_packed = np.full(step.n_ops, -1, np.int32)
        last_packed[at] = leave[output]  # ascending, so the last one stays
        free_after = _end_without(step, storage, block)
        waits = np.flatnonzero((free_after < step.n_ops) & (last_packed[np.minimum(free_after, step.n_ops - 1)] >= 0))
        edit.hold_through(waits.astype(np.int32), last_packed[free_after[waits]])
    end = _forward_end(step)
    _hold_inputs_of_leavers(edit, step, rows, leave, end)
    lands_after = end[np.minimum(block + 1, len(step.blocks) - 1)]
    next_before = np.append(before[1:], step.n_ops)
    by_next = next_before <= lands_after
    edit.let_go_before(storage[:-1][by_next[:-1]], leave[1:][by_next[:-1]])
    late = ~by_next
    edit.hold_through(storage[late], lands_after[late])


def _forward_end(step: Step) -> I32:
    """(blocks,) last forward op of each block, -1 where there is none."""
    forward = (step.op_phase == Phase.FORWARD) & (step.op_block >= 0)
    end = np.full(len(step.blocks), -1, np.int32)
    np.maximum.at(end, step.op_block[forward], np.flatnonzero(forward).astype(np.int32))
    return end


def _end_without(step: Step, storage: I32, block: I32) -> I32:
    """(m,) `step.end` as it would be if autograd did not hold what moves."""
    stays = _shared_saves(step, storage, block) < 0
    end = np.maximum(step.held_until, step.producer)
    np.maximum.at(end, step.use_storage, np.where(_reader_rows(step, storage, block) < 0, step.use_op, -1))
    np.maximum.at(end, step.save_storage[stays], step.save_until[stays])
    return end


def _hold_inputs_of_leavers(edit: Edit, step: Step, rows: I32, leave: I32, end: I32) -> None:
    """The caller of a block holds the block's input until the block returns, after the last copy that leaves at its end."""
    block = step.save_block[rows]
    at_end = step.save_before[rows] == end[block] + 1
    last_leave = np.full(len(step.blocks), -1, np.int32)
    last_leave[block[at_end]] = leave[at_end]  # ascending, so the last one stays
    reads = (step.op_phase[step.use_op] == Phase.FORWARD) & (step.op_block[step.use_op] >= 0)
    storage, reader = step.use_storage[reads], step.op_block[step.use_op[reads]]
    held = (_made_in(step)[storage] != reader) & (step.held_until[storage] == end[reader]) & (last_leave[reader] >= 0)
    edit.hold_through(storage[held], last_leave[reader[held]])


def _shared_saves(step: Step, storage: I32, block: I32) -> I32:
    """(v,) index of the moved storage that a save row now finds on the host: in its own block and in claimed later ones."""
    index = np.full(step.n_storages, -1, np.int32)
    index[storage] = np.arange(len(storage), dtype=np.int32)
    claimed = np.zeros(len(step.blocks) + 1, bool)
    claimed[block] = True
    found = index[step.save_storage]
    return np.where((step.save_block >= 0) & claimed[step.save_block], found, -1).astype(np.int32)


def _reader_rows(step: Step, storage: I32, block: I32) -> I32:
    """(u,) index of the moved storage that a use reads after it left: in backward or recomputation of a claimed block."""
    index = np.full(step.n_storages, -1, np.int32)
    index[storage] = np.arange(len(storage), dtype=np.int32)
    claimed = np.zeros(len(step.blocks) + 1, bool)
    claimed[block] = True
    later = (step.op_phase[step.use_op] == Phase.BACKWARD) | (step.op_phase[step.use_op] == Phase.RECOMPUTE)
    inside = claimed[step.op_block[step.use_op]] & (step.op_block[step.use_op] >= 0)
    return np.where(later & inside, index[step.use_storage], -1).astype(np.int32)


def _first_asked(step: Step, moved_save: I32, count: int) -> tuple[I32, I32]:
    """(moved,) op before which each storage must be back, n_ops if nobody asks, and the moved ones in order of asking."""
    rows = np.flatnonzero((moved_save >= 0) & (step.save_asked >= 0))
    rows = rows[np.lexsort((rows, step.save_turn[rows], step.save_asked[rows]))]
    moved, at = np.unique(moved_save[rows], return_index=True)
    first = np.full(count, step.n_ops, np.int32)
    first[moved] = step.save_asked[rows[at]]
    return first, moved[np.argsort(at)].astype(np.int32)


def _made_in(step: Step) -> I32:
    """(m,) block whose forward made each storage, -1 for none."""
    return np.where(step.producer >= 0, step.op_block[step.producer], -1).astype(np.int32)


def _come_back(edit: Edit, step: Step, storage: I32, block: I32, first: I32, asked: I32, host: I32) -> I32:
    """Insert the copies back, each just before it is asked for; returns the new storages (-1: never asked)."""
    ops = edit.add_ops(
        "memtune.to_device.default",
        before=first[asked],
        phase=Phase.BACKWARD,
        resource=Resource.HOST_TO_DEVICE,
        traffic_bytes=step.bytes[storage[asked]],
        block=block[asked],
    )
    edit.add_uses(ops, host[asked])
    back = np.full(len(storage), -1, np.int32)
    back[asked] = edit.add_storages(step.bytes[storage[asked]], producer=ops)
    return back
