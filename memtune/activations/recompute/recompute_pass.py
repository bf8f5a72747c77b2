"""Pass of recompute claims: inserts a second forward of the claimed blocks into backward.

It mirrors Rules 1 to 5 of `activations.recompute.activation_table`: a save inside a block is replaced by the
output of a second run, which starts before the first backward op that reads one and stops after the last
tensor that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.activations.recompute.rng_state_pass import keep_states, put_aside
from memtune.program import (
    FOREVER,
    I32,
    I64,
    WRITES,
    Edit,
    Kind,
    OpAddresses,
    Phase,
    Step,
    ThirdRuns,
    join_calls,
    nth_of_name,
    read_by_second_order,
    saved_in_backward,
    split_calls,
    third_runs,
)

Mask = npt.NDArray[np.bool_]
Keep = Callable[[str], bool] | Sequence[OpAddresses]


def recompute_blocks(step: Step, blocks: list[int], keep: Keep | None = None) -> Step:
    """Return `step` with the given blocks recomputed.

    Args:
        step: A recorded step, without any recomputation.
        blocks: Rows of `step.blocks`; each call of such a block that autograd recorded is run again
            separately.
        keep: Predicate on op names whose outputs are kept; or for each block the calls that do not run again;
            None keeps nothing.
    """
    calls = split_calls(step)
    if keep is not None and not callable(keep):
        keep = [keep[block] for block in step.calls.block]
    chosen = np.flatnonzero(np.isin(step.calls.block, blocks) & (step.calls.grad_enabled == 1))
    new = _recompute_calls(calls, chosen, keep)
    return step if new is calls else join_calls(new, step)


def _recompute_calls(step: Step, blocks: npt.NDArray[np.intp], keep: Keep | None) -> Step:
    """Apply `recompute_blocks` to blocks that run once each."""
    chosen = np.zeros(len(step.blocks) + 1, bool)  # the last entry serves block -1
    chosen[blocks] = True
    forward = (step.ops.phase == Phase.FORWARD) & chosen[step.ops.block]
    if keep is not None:  # under the dispatch mode of both runs no op reuses its arguments' memory
        step = step.without_donations(np.flatnonzero(forward).astype(np.int32))
    made_in = np.where(step.storages.producer >= 0, step.ops.block[step.storages.producer], -1)
    made_in[
        (step.storages.producer < 0) | ~forward[step.storages.producer]
    ] = -1  # (m,) block that made it in forward, if chosen
    tried, skipped = _kept_and_skipped(step, forward, keep)
    kept_op = tried & ~spoiled(step)

    end = np.full(len(step.blocks), -1, np.int32)
    np.maximum.at(end, step.ops.block[forward], np.flatnonzero(forward).astype(np.int32))

    number = (
        (step.saves.block >= 0) & chosen[step.saves.block] & (made_in[step.saves.storage] == step.saves.block)
    )
    # These are the saves that a second run must produce.
    number &= ~(kept_op | skipped)[step.storages.producer[step.saves.storage]]
    runs = _second_runs(step, number, end)
    if not (runs.release >= 0).any():
        return step
    wanted = number & (step.saves.held_until >= runs.anchor[step.saves.block])
    n_made = np.bincount(step.storages.producer[step.storages.producer >= 0], minlength=step.ops.n)
    again = (
        forward & ~kept_op & ((n_made > 0) | ~skipped) & (np.arange(step.ops.n) < runs.stop[step.ops.block])
    )

    edit = Edit(step)
    edit.drop_saves(number & ~wanted)
    # Each run writes BatchNorm's statistics; the second must leave them as the first did.
    buffers = _changed_buffers(step, forward, np.flatnonzero(runs.stop > 0).astype(np.int32))
    before = _copies_before(edit, step, forward, np.where(runs.release >= 0, runs.release, end))
    clones, copies = _save_buffers(edit, step, buffers, runs.anchor)
    _restore_buffers(edit, before, runs.anchor, runs.stop > 0)
    ops, new_op, new = _run_again(
        edit, step, np.flatnonzero(again).astype(np.int32), skipped, n_made, runs.anchor, end
    )
    new_op[again & skipped] -= n_made[again & skipped] - 1  # the first of several allocations
    _put_back_buffers(edit, step, buffers, copies, runs.anchor)

    # Backward of the same block, and the model's own recomputation in it, now read the second run's outputs.
    in_backward = (step.ops.phase == Phase.RECOMPUTE) | (step.ops.phase == Phase.BACKWARD)
    redirect = in_backward[step.uses.op] & (new[step.uses.storage] >= 0)
    redirect &= (step.ops.block[step.uses.op] == made_in[step.uses.storage]) & ~skipped[
        step.storages.producer[step.uses.storage]
    ]
    again_saved = saved_in_backward(step, redirect, ~number)
    third = third_runs(step, wanted, redirect)
    redirect |= (new[step.uses.storage] >= 0) & read_by_second_order(step, again_saved, again_saved | number)
    edit.set_uses(storage=np.where(redirect, new[edit.uses.storage], edit.uses.storage).astype(np.int32))
    _save_again(edit, step, wanted, wanted | again_saved, new, runs)
    starts = _starts(step, ops, new_op, buffers[0], clones)
    _unpack_before_runs(edit, step, wanted, starts, runs)
    put_aside(edit, step, ops, new_op)
    if third is not None:
        _run_a_third_time(edit, step, third, np.flatnonzero(again).astype(np.int32), skipped, end, buffers)
    kept = kept_op & (np.arange(step.ops.n) < runs.settled[step.ops.block])
    _hold_inputs_and_kept(
        edit, step, kept, made_in, end, runs, starts, _taken_before(step, kept, again, new_op, runs.anchor)
    )
    until = np.where(runs.release >= 0, runs.release, end)
    keep_states(edit, step, forward, (tried & ~kept, end), (skipped | kept, until))
    if keep is not None:
        _hold_tried(edit, step, tried, kept, number, end)
    return edit.done()


def _save_again(edit: Edit, step: Step, wanted: Mask, moved: Mask, new: I32, runs: _Runs) -> None:
    """Pack the saves in `wanted` in the second run, which makes the storages `new` of those in `moved`."""
    storage = np.where(moved, new[edit.saves.storage], edit.saves.storage)
    packed_before = np.where(wanted, runs.anchor[edit.saves.call], edit.saves.packed_before)
    # The table returns each recomputed tensor once, so it holds none beyond its use.
    handed_out = wanted & (step.saves.unpacked_before >= 0)
    held_until = np.where(handed_out, edit.saves.used_until, edit.saves.held_until)
    edit.set_saves(
        storage=storage.astype(np.int32),
        packed_before=packed_before.astype(np.int32),
        held_until=held_until.astype(np.int32),
    )


def _unpack_before_runs(edit: Edit, step: Step, wanted: Mask, starts: I32, runs: _Runs) -> None:
    """Unpack the other saves that backward asks for before it asks for a recomputed one: before the run."""
    early = (step.saves.block >= 0) & ~wanted & (step.saves.unpacked_before == runs.anchor[step.saves.block])
    early &= step.saves.unpack_order < runs.order_at_anchor[step.saves.block]
    unpacked_before = np.where(early, starts[edit.saves.call], edit.saves.unpacked_before)
    edit.set_saves(unpacked_before=unpacked_before.astype(np.int32))


def _run_again(
    edit: Edit, step: Step, ops: I32, skipped: Mask, n_made: npt.NDArray[np.intp], anchor: I32, end: I32
) -> tuple[I32, I32, I32]:
    """Copy `ops` before their blocks' anchors; return the copied ops and the maps of `Edit.copy_ops`."""
    ops = np.repeat(ops, np.where(skipped[ops], n_made[ops], 1))  # one allocation for each tensor
    where = step.ops.block[ops]
    return ops, *edit.copy_ops(ops, anchor[where], Phase.RECOMPUTE, end[where], skipped[ops])


def _run_a_third_time(
    edit: Edit, step: Step, third: ThirdRuns, again: I32, skipped: Mask, end: I32, buffers: tuple[I32, I32]
) -> None:
    """Insert a third run for what the last backward reads again, after freeing the second's outputs."""
    n_made = np.bincount(step.storages.producer[step.storages.producer >= 0], minlength=step.ops.n)
    in_third = third.anchor[buffers[0]] < step.ops.n
    changed = buffers[0][in_third], buffers[1][in_third]
    _, copies = _save_buffers(edit, step, changed, third.anchor)
    ops = again[again < third.stop[step.ops.block[again]]]
    ops, new_op, new = _run_again(edit, step, ops, skipped, n_made, third.anchor, end)
    put_aside(edit, step, ops, new_op)
    _put_back_buffers(edit, step, changed, copies, third.anchor)
    reads = third.reads & (new[step.uses.storage] >= 0)
    edit.set_uses(storage=np.where(reads, new[step.uses.storage], edit.uses.storage).astype(np.int32))
    saves = third.saves
    until = np.full(step.saves.n, -1, np.int32)
    until[saves] = third.first_until
    edit.set_saves(held_until=np.where(until >= 0, until, edit.saves.held_until).astype(np.int32))
    edit.set_saves(used_until=np.where(until >= 0, until, edit.saves.used_until).astype(np.int32))
    edit.add_saves(
        new[step.saves.storage[saves]],
        packed_before=third.anchor[step.saves.block[saves]],
        held_until=step.saves.used_until[saves],
        call=step.saves.call[saves],
        unpacked_before=third.asked,
        unpack_order=step.saves.unpack_order[saves],
    )


@dataclass(frozen=True)
class _Runs:
    """Bounds of each block's second run, (blocks,) each; blocks that are not run again have `stop` 0."""

    anchor: I32
    """The second run starts before this op, when backward first reads an output; n_ops for never."""
    order_at_anchor: I32
    """Position of that request among those before the same op."""
    stop: I32
    """The second run stops before this forward op: all that autograd still holds has been saved."""
    settled: I32
    """Like `stop`, as known when the block's forward returned; determines which outputs are kept."""
    release: I32
    """Op after which autograd holds no recomputed tensor, -1 if it holds none after forward."""


def _second_runs(step: Step, number: Mask, end: I32) -> _Runs:
    n_blocks = len(step.blocks)
    anchor, order_at_anchor = np.full(n_blocks, step.ops.n, np.int32), np.zeros(n_blocks, np.int32)
    asked = np.flatnonzero(number & (step.saves.unpacked_before >= 0))
    # Reversed, so that the first request of each block is assigned last and wins.
    asked = asked[np.lexsort((step.saves.unpack_order[asked], step.saves.unpacked_before[asked]))][::-1]
    anchor[step.saves.block[asked]], order_at_anchor[step.saves.block[asked]] = (
        step.saves.unpacked_before[asked],
        step.saves.unpack_order[asked],
    )
    after_forward = number & (step.saves.held_until > end[step.saves.block])
    # A save that autograd frees before backward begins is never asked for.
    wanted = number & (step.saves.held_until >= anchor[step.saves.block])

    def last(of: I32, rows: Mask, start: int) -> I32:
        found = np.full(n_blocks, start, np.int32)
        np.maximum.at(found, step.saves.block[rows], of[rows])
        return found

    return _Runs(
        anchor,
        order_at_anchor,
        last(step.saves.packed_before, wanted, 0),
        last(step.saves.packed_before, after_forward, 0),
        last(step.saves.held_until, after_forward, -1),
    )


def _kept_and_skipped(step: Step, forward: Mask, keep: Keep | None) -> tuple[Mask, Mask]:
    """Return the (n,) forward ops whose outputs `keep` names, and those that the second run skips."""
    if keep is None:
        return np.zeros(step.ops.n, bool), np.zeros(step.ops.n, bool)
    if callable(keep):
        by_name = np.asarray([keep(name) for name in step.names], bool)
        return forward & by_name[step.ops.name], np.zeros(step.ops.n, bool)
    tried, skipped = np.zeros(step.ops.n, bool), np.zeros(step.ops.n, bool)
    rows = np.flatnonzero(forward).astype(np.int32)
    blocks, nth = step.ops.block[rows], nth_of_name(step, rows)
    each = int(nth.max(initial=-1)) + 1
    of_name = {name: i for i, name in enumerate(step.names)}
    code = step.ops.name[rows].astype(np.int64) * each + nth
    alike: dict[int, list[int]] = {}  # equal blocks share one `OpAddresses`
    for block in np.flatnonzero(np.bincount(blocks)).tolist():
        alike.setdefault(id(keep[block]), []).append(block)
    for same in alike.values():
        mine = np.isin(blocks, same) if len(alike) > 1 else np.ones(len(rows), bool)
        calls = keep[same[0]]
        for found, named in ((tried, calls.kept), (skipped, calls.skipped)):
            is_named = np.zeros(len(step.names) * each, bool)
            is_named[[of_name[name] * each + i for name, i in named if name in of_name and i < each]] = True
            found[rows[mine]] = is_named[code[mine]]
    return tried, skipped


def spoiled(step: Step) -> Mask:
    """Return (n,) ops into whose outputs a later forward op writes: those are not kept (Rule 5)."""
    rows = np.flatnonzero(step.uses.mode == WRITES)
    rows = rows[step.ops.phase[step.uses.op[rows]] == Phase.FORWARD]
    producer = step.storages.producer[step.uses.storage[rows]]
    producer = producer[producer != step.uses.op[rows]]
    found = np.zeros(step.ops.n, bool)
    found[producer[producer >= 0]] = True
    return found


def _starts(step: Step, ops: I32, new_op: I32, cloned_in: I32, clones: I32) -> I32:
    """Return (blocks,) the new row of the first op of each second run."""
    starts = np.full(len(step.blocks), -1, np.int32)
    starts[step.ops.block[ops][::-1]] = new_op[ops][::-1]  # reversed, so that the first op of a block wins
    starts[cloned_in[::-1]] = clones[::-1]
    return starts


def _taken_before(step: Step, kept: Mask, again: Mask, new_op: I32, anchor: I32) -> I32:
    """Return (n,) the op before which the second run takes a kept op's outputs."""
    # That is the block's next op, or backward's first op after the block's last.
    taken = np.full(step.ops.n, -1, np.int32)
    rerun = np.flatnonzero(again)
    rows = np.flatnonzero(kept)
    if not len(rows) or not len(rerun):
        return taken
    after = rerun[np.minimum(np.searchsorted(rerun, rows), len(rerun) - 1)]
    inside = (after > rows) & (step.ops.block[after] == step.ops.block[rows])
    taken[rows] = np.where(inside, new_op[after], anchor[step.ops.block[rows]])
    return taken


def _changed_buffers(step: Step, forward: Mask, active: I32, *, may_read: bool = False) -> tuple[I32, I32]:
    """Return (block[i], storage[i]) buffers that a forward writes (Rule 4), perhaps without statistics."""
    rows = np.flatnonzero(step.uses.mode == WRITES)
    rows = rows[step.storages.kind[step.uses.storage[rows]] == Kind.BUFFER]
    rows = rows[forward[step.uses.op[rows]]]
    rows = rows[np.isin(step.ops.block[step.uses.op[rows]], active)]
    if may_read and len(rows):
        is_norm = np.asarray(["batch_norm" in name for name in step.names], bool)
        norms = np.unique(step.ops.module[forward & is_norm[step.ops.name]])
        rows = rows[~np.isin(step.ops.module[step.uses.op[rows]], norms)]
    if not len(rows):
        return np.empty(0, np.int32), np.empty(0, np.int32)
    pairs = np.unique(np.stack([step.ops.block[step.uses.op[rows]], step.uses.storage[rows]], 1), axis=0)
    return pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32)


@dataclass(frozen=True)
class _Before:
    """Copies of buffers from before a block's first run: (k,) each."""

    block: I32
    buffer: I32
    bytes: I64
    copy: I32


def _copies_before(edit: Edit, step: Step, forward: Mask, until: I32) -> _Before:
    """Clone the buffers that the second run must find unchanged; each block frees its own at `until`."""
    block, buffer = _changed_buffers(
        step, forward, np.arange(len(step.blocks), dtype=np.int32), may_read=True
    )
    if not len(block):
        return _Before(block, buffer, np.empty(0, np.int64), buffer)
    rows = np.flatnonzero(forward).astype(np.int32)
    blocks, at = np.unique(step.ops.block[rows], return_index=True)
    first = rows[at][np.searchsorted(blocks, block)]
    n_bytes = step.storages.bytes[buffer]
    clones = edit.add_ops(
        "aten.clone.default",
        before=first,
        phase=Phase.FORWARD,
        call=block,
        traffic_bytes=2 * n_bytes,
        reads=buffer,
    )
    copies = edit.add_storages(n_bytes, producer=clones)
    edit.hold_through(copies, until[block])
    return _Before(block, buffer, n_bytes, copies)


def _restore_buffers(edit: Edit, before: _Before, anchor: I32, active: Mask) -> None:
    """Restore the buffers' values before the second run starts."""
    rows = active[before.block]
    if not rows.any():
        return
    block, buffer = before.block[rows], before.buffer[rows]
    edit.add_ops(
        "aten.copy_.default",
        before=anchor[block],
        phase=Phase.RECOMPUTE,
        call=block,
        traffic_bytes=2 * before.bytes[rows],
        reads=before.copy[rows],
        writes=buffer,
    )


def _save_buffers(edit: Edit, step: Step, buffers: tuple[I32, I32], anchor: I32) -> tuple[I32, I32]:
    """Clone the buffers before the second run; return the cloning ops and the clones."""
    block, storage = buffers
    if not len(block):
        return block, storage
    ops = edit.add_ops(
        "aten.clone.default",
        before=anchor[block],
        phase=Phase.RECOMPUTE,
        call=block,
        traffic_bytes=2 * step.storages.bytes[storage],
        reads=storage,
    )
    return ops, edit.add_storages(step.storages.bytes[storage], producer=ops)


def _put_back_buffers(edit: Edit, step: Step, buffers: tuple[I32, I32], copies: I32, anchor: I32) -> None:
    block, storage = buffers
    if not len(block):
        return
    ops = edit.add_ops(
        "aten.copy_.default",
        before=anchor[block],
        phase=Phase.RECOMPUTE,
        call=block,
        traffic_bytes=2 * step.storages.bytes[storage],
        writes=storage,
    )
    last = np.asarray([ops[np.flatnonzero(block == b)[-1]] for b in block], np.int32)
    edit.add_uses(last, copies)  # the copies are freed together, after the last buffer is restored


def _hold_inputs_and_kept(
    edit: Edit, step: Step, kept: Mask, made_in: I32, end: I32, runs: _Runs, starts: I32, taken: I32
) -> None:
    """Hold inputs and kept outputs until the block's last recomputed tensor has been read."""
    outputs = np.flatnonzero(_made_by(step, kept)).astype(np.int32)
    inputs = (runs.release[step.calls.input_block] >= 0) & (
        step.storages.held_until[step.calls.inputs.storage] != FOREVER
    )
    # A block that gets its own earlier output back: that is a kept value, not an input.
    inputs &= made_in[step.calls.inputs.storage] != step.calls.input_block
    block = np.concatenate([step.calls.input_block[inputs], made_in[outputs]])
    storage = np.concatenate([step.calls.inputs.storage[inputs], outputs])
    asked = np.concatenate([starts[step.calls.input_block[inputs]], taken[step.storages.producer[outputs]]])
    order = np.argsort(block, kind="stable")
    block = block[order].astype(np.int32)
    storage = storage[order].astype(np.int32)
    asked = asked[order].astype(np.int32)
    edit.add_saves(
        storage,
        packed_before=end[block] + 1,
        held_until=runs.release[block],
        call=block,
        unpacked_before=asked,
        unpack_order=runs.order_at_anchor[block],
    )


def _made_by(step: Step, ops: Mask) -> Mask:
    """Return (m,) outputs of `ops`; a kernel's workspace is freed when the kernel returns."""
    made: Mask = (
        (step.storages.producer >= 0) & ops[step.storages.producer] & (step.storages.kind != Kind.WORKSPACE)
    )
    return made


def _hold_tried(edit: Edit, step: Step, tried: Mask, kept: Mask, number: Mask, end: I32) -> None:
    """Hold all outputs that `keep` names until the block has run."""
    # Only then is known which ones the second run reads.
    # An output that autograd saved as well counts as a save: if it is offloaded, it is not held here either.
    storage = np.flatnonzero(_made_by(step, tried & ~kept)).astype(np.int32)
    block = step.ops.block[step.storages.producer[storage]]
    saved = np.zeros(step.storages.n, bool)
    rows = (step.saves.block >= 0) & ~number
    rows[rows] = step.ops.block[step.storages.producer[step.saves.storage[rows]]] == step.saves.block[rows]
    saved[step.saves.storage[rows]] = True
    edit.hold_through(storage[~saved[storage]], end[block[~saved[storage]]])
    storage, block = storage[saved[storage]], block[saved[storage]]
    never = np.full(len(storage), -1, np.int32)
    edit.add_saves(
        storage,
        packed_before=end[block] + 1,
        held_until=end[block],
        call=block,
        unpacked_before=never,
        unpack_order=never,
    )
