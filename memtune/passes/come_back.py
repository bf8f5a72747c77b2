"""How moved activations come back in backward: one by one, before a stage's backward, or ahead of their use.

The other half of `passes.move`. What went on to SSD is read there first. While outputs that were kept come back, the second run
of a block holds what the first one held.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.passes.leaving import Leaving
from memtune.program import I32, I64, Phase, Resource, Step, Tier
from memtune.read_ahead import WRITES, reads


@dataclass(frozen=True)
class Lookahead:
    """Tensors that come back before they are asked for, and those that leave at once."""

    back: int = 0
    out: int = 1


def come_back(
    edit: Edit, step: Step, out: Leaving, first: I32, asked: I32, on: npt.NDArray[np.bool_], ssd_ahead: int, stage: I32
) -> tuple[I32, I32]:
    """Insert the copies back, each just before it is asked for and after the reads that it starts; returns both, as asked.

    A copy belongs to the block whose backward asks for it: what several blocks saved comes back with the last of them.
    `stage` is that of each, among whose own reads come ahead.
    """
    fetched, is_read = asked, np.zeros(len(asked), bool)
    moving = asked
    if on.any():
        shelved = asked[on[asked]]
        pairs: list[tuple[int, int, bool]] = []
        starts: dict[int, list[int]] = {}
        for each in np.unique(stage[shelved]).tolist():
            mine = shelved[stage[shelved] == each]
            for fetch, tensor in reads(np.sort(mine).tolist(), mine.tolist(), ssd_ahead):
                starts.setdefault(fetch, []).append(tensor)
        for each in asked.tolist():
            pairs += [(each, tensor, True) for tensor in starts.get(each, [])] + [(each, each, False)]
        fetched, moving = (np.asarray([pair[i] for pair in pairs], np.int32) for i in (0, 1))
        is_read = np.asarray([pair[2] for pair in pairs], bool)
    asking = step.op_block[first[fetched]]
    names = _names(edit, out)[moving]
    if is_read.any():
        names = np.where(is_read, edit.name_id("memtune.from_ssd.default"), names).astype(np.int32)
    ops = edit.add_ops(
        names,
        before=first[fetched],
        phase=Phase.BACKWARD,
        resource=np.where(is_read, np.uint8(Resource.SSD_READ), np.uint8(Resource.HOST_TO_DEVICE)),
        traffic_bytes=out.n_bytes[moving],
        call=np.where(asking >= 0, asking, out.block[fetched]),
        stream=np.where(is_read, 0, 1).astype(np.uint8),  # a copy back is complete in stream order
        prefetch=is_read.astype(np.uint8),
    )
    read = np.full(len(on), -1, np.int32)
    read[moving[is_read]] = ops[is_read]
    return ops[~is_read], read[asked]


def _names(edit: Edit, out: Leaving) -> I32:
    """The copies back: what is cut is put together again."""
    whole = np.full(len(out.storage), edit.name_id("memtune.to_device.default"), np.int32)
    return np.where(out.is_cut, edit.name_id("memtune.to_device_beside.default"), whole) if out.is_cut.any() else whole


def come_together(edit: Edit, out: Leaving, first: I32, asked: I32) -> I32:
    """Insert the copies back of each stage before its backward, on a stream of their own."""
    return edit.add_ops(
        _names(edit, out)[asked],
        before=first[asked],
        phase=Phase.BACKWARD,
        resource=Resource.HOST_TO_DEVICE,
        traffic_bytes=out.n_bytes[asked],
        call=out.block[asked],
        prefetch=1,
    )


def come_ahead(edit: Edit, step: Step, out: Leaving, host: I32, first: I32, asked: I32, look: Lookahead) -> tuple[I32, I32]:
    """As `come_back`, by the rule of `runtime.come_ahead`; also the last copy that each one starts, as asked, -1 for none.

    Copies ahead of their use are on a stream of their own, after what has been computed so far. What they come from stays on the
    `host` until they are asked for, and the copies that this starts have begun.
    """
    # Schedules run ops again, not blocks; backward that is differentiated runs in this phase, and is no copy.
    runs_again = (step.op_phase == Phase.RECOMPUTE) & (step.op_copy_of >= 0) & (not step.by_schedules)
    again, block = np.unique(step.op_block[runs_again]), out.block
    left = asked[np.lexsort((np.where(np.isin(block[asked], again), -asked, asked), block[asked]))]
    pairs = reads(left.tolist(), asked.tolist(), look.back)
    fetched, moving = (np.asarray([pair[i] for pair in pairs], np.int32) for i in (0, 1))
    asking, early = step.op_block[first[fetched]], fetched != moving
    ops = edit.add_ops(
        _names(edit, out)[moving],
        before=first[fetched],
        phase=Phase.BACKWARD,
        resource=Resource.HOST_TO_DEVICE,
        traffic_bytes=out.n_bytes[moving],
        call=np.where(asking >= 0, asking, block[fetched]),
        stream=np.where(early, 0, 1).astype(np.uint8),
        prefetch=early.astype(np.uint8),
    )
    turn = np.empty(len(block), np.int32)
    turn[asked] = np.arange(len(asked), dtype=np.int32)
    mine = moving[early]
    before = np.searchsorted(turn[fetched], turn[mine], side="right") - 1  # the last copy that has been started then
    same_place = (before >= 0) & (first[fetched[before]] == first[mine])
    edit.hold_through(host[mine], np.where(same_place, ops[before], first[mine] - 1).astype(np.int32))
    came, at = (np.full(len(block), -1, np.int32) for _ in range(2))
    came[moving], at[fetched] = ops, ops  # of several copies at one place the last
    return came[asked], at[asked]


def shelve(edit: Edit, n_bytes: I64, host: I32, write: I32, asked: I32, back: I32, read: I32, *, on_stages: bool) -> I32:
    """Host memory until the write is over, SSD until the copy back, host memory again from the read on; returns the last.

    On stages of a pipeline `passes.stage_shelf`, which knows the other micro-batches, says when a write is over.
    """
    shelved = edit.add_storages(n_bytes, producer=write, tier=Tier.SSD)
    edit.add_uses(write, host)
    if not on_stages:
        edit.let_go_before(host[:-WRITES], write[WRITES:])
    if not len(asked):
        return host
    if not on_stages:
        last = host[-WRITES:]
        edit.let_go_before(last, np.full(len(last), read[0], np.int32))
    edit.add_uses(read, shelved[asked])
    edit.hold_through(shelved[asked], back)
    again = host.copy()
    again[asked] = edit.add_storages(n_bytes[asked], producer=read, tier=Tier.HOST)
    return again


def hold_locals(edit: Edit, step: Step, storage: I32, ops: I32) -> None:
    """While outputs that were kept come back in place of an op, the second run holds what the first one held there."""
    if step.by_schedules or not (step.op_copy_of >= 0).any():
        return
    twin, held = _twins(step), step.held_until.copy()
    forward = step.use_phase == Phase.FORWARD
    np.maximum.at(held, step.use_storage[forward], step.use_op[forward])
    # Pairs of a storage that comes back and one that its block's first run held over the op that made it.
    originals = np.flatnonzero(twin >= 0)
    originals = originals[np.argsort(step.op_block[step.producer[originals]], kind="stable")]
    made_in = step.op_block[step.producer[originals]]
    ops, kept_op = ops[step.producer[storage] >= 0], step.producer[storage]
    kept_op = kept_op[kept_op >= 0]
    first, stop = (np.searchsorted(made_in, step.op_block[kept_op], side) for side in ("left", "right"))
    number = np.repeat(np.arange(len(ops)), stop - first)
    mine = originals[np.arange(len(number)) + np.repeat(first - np.cumsum(stop - first) + (stop - first), stop - first)]
    inside = (step.producer[mine] < kept_op[number]) & (held[mine] >= kept_op[number])
    edit.hold_through(twin[mine[inside]], ops[number[inside]])


def _twins(step: Step) -> I32:
    """(m,) what the second run made in place of each storage, -1 for none; what a third one makes is not looked at."""
    twin = np.full(step.n_storages, -1, np.int32)
    made = (step.producer >= 0) & (step.tier == Tier.DEVICE)  # states of random numbers, which only one run may keep, are not
    copies = np.flatnonzero(made & (step.op_copy_of[step.producer] >= 0))
    copied = np.zeros(step.n_ops, bool)
    copied[step.op_copy_of[step.op_copy_of >= 0]] = True
    originals = np.flatnonzero(made & copied[step.producer])
    copies = copies[np.lexsort((copies, step.op_copy_of[step.producer[copies]]))]
    originals = originals[np.lexsort((originals, step.producer[originals]))]
    if len(copies) > len(originals):
        of = step.op_copy_of[step.producer[copies]]
        n_made = np.bincount(step.producer[originals], minlength=step.n_ops)
        copies = copies[np.arange(len(of)) - np.searchsorted(of, of) < n_made[of]]
    twin[originals] = copies
    return twin
