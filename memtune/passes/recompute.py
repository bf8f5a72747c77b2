"""The pass of `runtime.activations`' recompute claims: run blocks' forwards again in backward, but for what is kept.

It mirrors Rules 1 to 5 there: what autograd saved inside a block becomes the product of a second run, which starts
before the first backward node that needs it and stops after the last tensor that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.calls import Call, Calls
from memtune.edit import Edit
from memtune.passes.calls import join_calls, split_calls
from memtune.passes.random_states import keep_states, put_aside
from memtune.passes.second_order import ThirdRuns, read_by_second_order, saved_in_backward, third_runs
from memtune.program import FOREVER, I32, I64, Kind, Phase, Step

Mask = npt.NDArray[np.bool_]
Keep = Callable[[str], bool] | Sequence[Calls]


def recompute_blocks(step: Step, blocks: list[int], keep: Keep | None = None) -> Step:
    """`step` with the given blocks recomputed.

    Args:
        step: As recorded, without any recomputation.
        blocks: Rows of `step.blocks`; every call of such a block that autograd saw is run again by itself.
        keep: Which ops' outputs are kept, by op name; or for each block which calls do not run again; None keeps nothing.
    """
    calls = split_calls(step)
    if keep is not None and not callable(keep):
        keep = [keep[block] for block in step.call_block]
    chosen = np.flatnonzero(np.isin(step.call_block, blocks) & (step.call_grad == 1))
    new = _recompute_calls(calls, chosen, keep)
    return step if new is calls else join_calls(new, step)


def _recompute_calls(step: Step, blocks: npt.NDArray[np.intp], keep: Keep | None) -> Step:
    """`recompute_blocks`, with blocks that run once."""
    chosen = np.zeros(len(step.blocks) + 1, bool)  # the last entry serves block -1
    chosen[blocks] = True
    forward = (step.op_phase == Phase.FORWARD) & chosen[step.op_block]
    if keep is not None:  # a dispatch mode looks for what is kept, in both runs
        step = step.without_handing_over(np.flatnonzero(forward).astype(np.int32))
    made_in = np.where(step.producer >= 0, step.op_block[step.producer], -1)
    made_in[(step.producer < 0) | ~forward[step.producer]] = -1  # (m,) block that made it in forward, if chosen
    tried, left_out = _tried_and_left_out(step, forward, keep)
    kept_op = tried & ~spoiled(step)

    end = np.full(len(step.blocks), -1, np.int32)
    np.maximum.at(end, step.op_block[forward], np.flatnonzero(forward).astype(np.int32))

    number = (step.save_block >= 0) & chosen[step.save_block] & (made_in[step.save_storage] == step.save_block)
    number &= ~(kept_op | left_out)[step.producer[step.save_storage]]
    runs = _second_runs(step, number, end)
    if not (runs.release >= 0).any():
        return step
    wanted = number & (step.save_until >= runs.anchor[step.save_block])
    n_made = np.bincount(step.producer[step.producer >= 0], minlength=step.n_ops)
    again = forward & ~kept_op & ((n_made > 0) | ~left_out) & (np.arange(step.n_ops) < runs.stop[step.op_block])

    edit = Edit(step)
    edit.drop_saves(number & ~wanted)
    buffers = _changed_buffers(step, forward, np.flatnonzero(runs.stop > 0).astype(np.int32))
    before = _copies_before(edit, step, forward, np.where(runs.release >= 0, runs.release, end))
    clones, copies = _save_buffers(edit, step, buffers, runs.anchor)
    _give_back(edit, before, runs.anchor, runs.stop > 0)
    ops, new_op, new = _run_again(edit, step, np.flatnonzero(again).astype(np.int32), left_out, n_made, runs.anchor, end)
    new_op[again & left_out] -= n_made[again & left_out] - 1  # the first of several allocations
    _put_back_buffers(edit, step, buffers, copies, runs.anchor)

    # Backward of the same block now reads the second run's products; so does a recomputation of the model's own in it.
    in_backward = (step.op_phase == Phase.RECOMPUTE) | (step.op_phase == Phase.BACKWARD)
    redirect = in_backward[step.use_op] & (new[step.use_storage] >= 0)
    redirect &= (step.op_block[step.use_op] == made_in[step.use_storage]) & ~left_out[step.producer[step.use_storage]]
    again_saved = saved_in_backward(step, redirect, ~number)
    third = third_runs(step, wanted, redirect, again_saved)
    redirect |= (new[step.use_storage] >= 0) & read_by_second_order(step, again_saved, again_saved | number)
    edit.use_storage = np.where(redirect, new[edit.use_storage], edit.use_storage).astype(np.int32)
    edit.save_storage = np.where(wanted | again_saved, new[edit.save_storage], edit.save_storage).astype(np.int32)
    handed_out = wanted & (step.save_asked >= 0)  # each once
    edit.save_until = np.where(handed_out, edit.save_used_until, edit.save_until).astype(np.int32)
    edit.save_before = np.where(wanted, runs.anchor[edit.save_call], edit.save_before).astype(np.int32)

    starts = _starts(step, ops, new_op, buffers[0], clones)
    before_run = (step.save_block >= 0) & ~wanted & (step.save_asked == runs.anchor[step.save_block])
    before_run &= step.save_turn < runs.turn[step.save_block]
    edit.save_asked = np.where(before_run, starts[edit.save_call], edit.save_asked).astype(np.int32)
    put_aside(edit, step, ops, new_op)
    if third is not None:
        _run_a_third_time(edit, step, third, np.flatnonzero(again).astype(np.int32), left_out, end, buffers)
    kept = kept_op & (np.arange(step.n_ops) < runs.settled[step.op_block])
    _hold_inputs_and_kept(edit, step, kept, made_in, end, runs, starts, _taken_before(step, kept, again, new_op, runs.anchor))
    until = np.where(runs.release >= 0, runs.release, end)
    keep_states(edit, step, forward, (tried & ~kept, end), (left_out | kept, until))
    if keep is not None:
        _hold_tried(edit, step, tried, kept, number, end)
    return edit.done()


def _run_again(
    edit: Edit, step: Step, ops: I32, left_out: Mask, n_made: npt.NDArray[np.intp], anchor: I32, end: I32
) -> tuple[I32, I32, I32]:
    """Copy `ops` to before their blocks' anchors: those copied, and where they and what they make are, as `Edit.copy_ops`."""
    ops = np.repeat(ops, np.where(left_out[ops], n_made[ops], 1))  # one allocation for each tensor
    where = step.op_block[ops]
    return ops, *edit.copy_ops(ops, anchor[where], Phase.RECOMPUTE, end[where], left_out[ops])


def _run_a_third_time(
    edit: Edit, step: Step, third: ThirdRuns, again: I32, left_out: Mask, end: I32, buffers: tuple[I32, I32]
) -> None:
    """Rule 2 of `second_order`: what the last backward asks for again is made once more; the second run's is let go before."""
    n_made = np.bincount(step.producer[step.producer >= 0], minlength=step.n_ops)
    in_third = third.anchor[buffers[0]] < step.n_ops
    changed = buffers[0][in_third], buffers[1][in_third]
    _, copies = _save_buffers(edit, step, changed, third.anchor)
    ops = again[again < third.stop[step.op_block[again]]]
    ops, new_op, new = _run_again(edit, step, ops, left_out, n_made, third.anchor, end)
    put_aside(edit, step, ops, new_op)
    _put_back_buffers(edit, step, changed, copies, third.anchor)
    reads = third.reads & (new[step.use_storage] >= 0)
    edit.use_storage = np.where(reads, new[step.use_storage], edit.use_storage).astype(np.int32)
    saves = third.saves
    until = np.full(len(step.save_until), -1, np.int32)
    until[saves] = third.first_until
    edit.save_until = np.where(until >= 0, until, edit.save_until).astype(np.int32)
    edit.save_used_until = np.where(until >= 0, until, edit.save_used_until).astype(np.int32)
    edit.add_saves(
        new[step.save_storage[saves]],
        before=third.anchor[step.save_block[saves]],
        until=step.save_used_until[saves],
        call=step.save_call[saves],
        asked=third.asked,
        turn=step.save_turn[saves],
    )


@dataclass(frozen=True)
class _Runs:
    """When each block runs again, (blocks,) each; blocks that never do have `stop` 0."""

    anchor: I32
    """The second run starts before this op, when backward first asks for a product; n_ops for never."""
    turn: I32
    """Turn of that request among those before the same op."""
    stop: I32
    """It stops before this forward op, when all that autograd still holds is there."""
    settled: I32
    """As `stop`, as it looked when the block's forward had returned: that decides what is kept."""
    release: I32
    """Op after which autograd holds no product any longer, -1 if it holds none after forward."""


def _second_runs(step: Step, number: Mask, end: I32) -> _Runs:
    n_blocks = len(step.blocks)
    anchor, turn = np.full(n_blocks, step.n_ops, np.int32), np.zeros(n_blocks, np.int32)
    asked = np.flatnonzero(number & (step.save_asked >= 0))
    asked = asked[np.lexsort((step.save_turn[asked], step.save_asked[asked]))][::-1]  # the first one is written last
    anchor[step.save_block[asked]], turn[step.save_block[asked]] = step.save_asked[asked], step.save_turn[asked]
    after_forward = number & (step.save_until > end[step.save_block])
    wanted = number & (step.save_until >= anchor[step.save_block])

    def last(of: I32, rows: Mask, start: int) -> I32:
        found = np.full(n_blocks, start, np.int32)
        np.maximum.at(found, step.save_block[rows], of[rows])
        return found

    return _Runs(
        anchor, turn, last(step.save_before, wanted, 0), last(step.save_before, after_forward, 0),
        last(step.save_until, after_forward, -1),
    )  # fmt: skip


def _tried_and_left_out(step: Step, forward: Mask, keep: Keep | None) -> tuple[Mask, Mask]:
    """(n,) forward ops whose outputs `keep` names, and those that it leaves out of the second run."""
    if keep is None:
        return np.zeros(step.n_ops, bool), np.zeros(step.n_ops, bool)
    if callable(keep):
        by_name = np.asarray([keep(name) for name in step.names], bool)
        return forward & by_name[step.op_name], np.zeros(step.n_ops, bool)
    tried, left_out = np.zeros(step.n_ops, bool), np.zeros(step.n_ops, bool)
    rows = np.flatnonzero(forward).astype(np.int32)
    blocks, nth = step.op_block[rows], _nth(step, rows)
    each = int(nth.max(initial=-1)) + 1
    of_name = {name: i for i, name in enumerate(step.names)}
    code = step.op_name[rows].astype(np.int64) * each + nth
    alike: dict[int, list[int]] = {}  # equal blocks share one `Calls`
    for block in np.flatnonzero(np.bincount(blocks)).tolist():
        alike.setdefault(id(keep[block]), []).append(block)
    for same in alike.values():
        mine = np.isin(blocks, same) if len(alike) > 1 else np.ones(len(rows), bool)
        calls = keep[same[0]]
        for found, named in ((tried, calls.kept), (left_out, calls.left_out)):
            is_named = np.zeros(len(step.names) * each, bool)
            is_named[[of_name[name] * each + i for name, i in named if name in of_name and i < each]] = True
            found[rows[mine]] = is_named[code[mine]]
    return tried, left_out


def calls_of(step: Step, ops: I32) -> list[tuple[int, int, Call]]:
    """Row, block and address of each of `ops`: all forward ops of some blocks, ascending."""
    names, blocks = step.op_name[ops].tolist(), step.op_block[ops].tolist()
    rows = zip(ops.tolist(), blocks, names, _nth(step, ops).tolist(), strict=True)
    return [(op, block, (step.names[name], i)) for op, block, name, i in rows]


def _nth(step: Step, ops: I32) -> I64:
    """(k,) how many of `ops` before each are of the same name in the same block."""
    key = step.op_block[ops].astype(np.int64) * len(step.names) + step.op_name[ops]
    order = np.argsort(key, kind="stable")
    new = np.append(True, np.diff(key[order]) > 0)[: len(ops)]
    found = np.empty(len(ops), np.int64)
    found[order] = np.arange(len(ops)) - np.maximum.accumulate(np.where(new, np.arange(len(ops)), 0))
    return found


def spoiled(step: Step) -> Mask:
    """(n,) ops into whose outputs another op of the forward writes later: those are not kept (Rule 5)."""
    rows = np.flatnonzero(step.use_mutates == 1)
    rows = rows[step.op_phase[step.use_op[rows]] == Phase.FORWARD]
    producer = step.producer[step.use_storage[rows]]
    producer = producer[producer != step.use_op[rows]]
    found = np.zeros(step.n_ops, bool)
    found[producer[producer >= 0]] = True
    return found


def _starts(step: Step, ops: I32, new_op: I32, cloned_in: I32, clones: I32) -> I32:
    """(blocks,) new row of the first op of each second run."""
    starts = np.full(len(step.blocks), -1, np.int32)
    starts[step.op_block[ops][::-1]] = new_op[ops][::-1]  # the first one is written last
    starts[cloned_in[::-1]] = clones[::-1]
    return starts


def _taken_before(step: Step, kept: Mask, again: Mask, new_op: I32, anchor: I32) -> I32:
    """(n,) op before which the second run takes a kept op's outputs: its next op, or backward's own after its last."""
    taken = np.full(step.n_ops, -1, np.int32)
    rerun = np.flatnonzero(again)
    rows = np.flatnonzero(kept)
    if not len(rows) or not len(rerun):
        return taken
    after = rerun[np.minimum(np.searchsorted(rerun, rows), len(rerun) - 1)]
    inside = (after > rows) & (step.op_block[after] == step.op_block[rows])
    taken[rows] = np.where(inside, new_op[after], anchor[step.op_block[rows]])
    return taken


def _changed_buffers(step: Step, forward: Mask, active: I32, *, may_read: bool = False) -> tuple[I32, I32]:
    """Blocks and buffers (block[i], storage[i]) that a block's forward writes into (Rule 4), with `may_read` norms left out."""
    rows = np.flatnonzero(step.use_mutates == 1)
    rows = rows[step.kind[step.use_storage[rows]] == Kind.BUFFER]
    rows = rows[forward[step.use_op[rows]]]
    rows = rows[np.isin(step.op_block[step.use_op[rows]], active)]
    if may_read and len(rows):
        is_norm = np.asarray(["batch_norm" in name for name in step.names], bool)
        norms = np.unique(step.op_module[forward & is_norm[step.op_name]])
        rows = rows[~np.isin(step.op_module[step.use_op[rows]], norms)]
    if not len(rows):
        return np.empty(0, np.int32), np.empty(0, np.int32)
    pairs = np.unique(np.stack([step.op_block[step.use_op[rows]], step.use_storage[rows]], 1), axis=0)
    return pairs[:, 0].astype(np.int32), pairs[:, 1].astype(np.int32)


@dataclass(frozen=True)
class _Before:
    """Copies of what is in buffers before a block runs: (k,) each."""

    block: I32
    buffer: I32
    bytes: I64
    copy: I32


def _copies_before(edit: Edit, step: Step, forward: Mask, until: I32) -> _Before:
    """Clone the buffers that the second run must find as the first one did; `until` says when each block lets go of them."""
    block, buffer = _changed_buffers(step, forward, np.arange(len(step.blocks), dtype=np.int32), may_read=True)
    if not len(block):
        return _Before(block, buffer, np.empty(0, np.int64), buffer)
    rows = np.flatnonzero(forward).astype(np.int32)
    blocks, at = np.unique(step.op_block[rows], return_index=True)
    first = rows[at][np.searchsorted(blocks, block)]
    n_bytes = step.bytes[buffer]
    clones = edit.add_ops("aten.clone.default", before=first, phase=Phase.FORWARD, call=block, traffic_bytes=2 * n_bytes)
    edit.add_uses(clones, buffer)
    copies = edit.add_storages(n_bytes, producer=clones)
    edit.hold_through(copies, until[block])
    return _Before(block, buffer, n_bytes, copies)


def _give_back(edit: Edit, before: _Before, anchor: I32, active: Mask) -> None:
    """The second run finds in the buffers what the first one found."""
    rows = active[before.block]
    if not rows.any():
        return
    block, buffer = before.block[rows], before.buffer[rows]
    ops = edit.add_ops(
        "aten.copy_.default", before=anchor[block], phase=Phase.RECOMPUTE, call=block, traffic_bytes=2 * before.bytes[rows]
    )
    edit.add_uses(ops, before.copy[rows])
    edit.add_uses(ops, buffer, mutates=True)


def _save_buffers(edit: Edit, step: Step, buffers: tuple[I32, I32], anchor: I32) -> tuple[I32, I32]:
    """Clone the buffers before the second run; returns the cloning ops and what they make."""
    block, storage = buffers
    if not len(block):
        return block, storage
    ops = edit.add_ops(
        "aten.clone.default", before=anchor[block], phase=Phase.RECOMPUTE, call=block, traffic_bytes=2 * step.bytes[storage]
    )
    edit.add_uses(ops, storage)
    return ops, edit.add_storages(step.bytes[storage], producer=ops)


def _put_back_buffers(edit: Edit, step: Step, buffers: tuple[I32, I32], copies: I32, anchor: I32) -> None:
    block, storage = buffers
    if not len(block):
        return
    ops = edit.add_ops(
        "aten.copy_.default", before=anchor[block], phase=Phase.RECOMPUTE, call=block, traffic_bytes=2 * step.bytes[storage]
    )
    edit.add_uses(ops, storage, mutates=True)
    last = np.asarray([ops[np.flatnonzero(block == b)[-1]] for b in block], np.int32)
    edit.add_uses(last, copies)  # the copies are let go together, after the last one is put back


def _hold_inputs_and_kept(
    edit: Edit, step: Step, kept: Mask, made_in: I32, end: I32, runs: _Runs, starts: I32, taken: I32
) -> None:
    """What the second run needs stays until the block's last recomputed tensor has been used."""
    outputs = np.flatnonzero(_made_by(step, kept)).astype(np.int32)
    inputs = (runs.release[step.input_block] >= 0) & (step.held_until[step.input_storage] != FOREVER)
    inputs &= made_in[step.input_storage] != step.input_block
    block = np.concatenate([step.input_block[inputs], made_in[outputs]])
    storage = np.concatenate([step.input_storage[inputs], outputs])
    asked = np.concatenate([starts[step.input_block[inputs]], taken[step.producer[outputs]]])
    order = np.argsort(block, kind="stable")
    block, storage, asked = block[order].astype(np.int32), storage[order].astype(np.int32), asked[order].astype(np.int32)
    edit.add_saves(storage, before=end[block] + 1, until=runs.release[block], call=block, asked=asked, turn=runs.turn[block])


def _made_by(step: Step, ops: Mask) -> Mask:
    """(m,) outputs of `ops`; a kernel's scratch is gone when it returns, whatever is kept of the op."""
    made: Mask = (step.producer >= 0) & ops[step.producer] & (step.kind != Kind.WORKSPACE)
    return made


def _hold_tried(edit: Edit, step: Step, tried: Mask, kept: Mask, number: Mask, end: I32) -> None:
    """Until the block has run nobody knows which outputs the second run will ask for, so all that `keep` names are held.

    One that autograd saved as well counts as saved: if it moves to the host, it is not held here either.
    """
    storage = np.flatnonzero(_made_by(step, tried & ~kept)).astype(np.int32)
    block = step.op_block[step.producer[storage]]
    saved = np.zeros(step.n_storages, bool)
    rows = (step.save_block >= 0) & ~number
    rows[rows] = step.op_block[step.producer[step.save_storage[rows]]] == step.save_block[rows]
    saved[step.save_storage[rows]] = True
    edit.hold_through(storage[~saved[storage]], end[block[~saved[storage]]])
    storage, block = storage[saved[storage]], block[saved[storage]]
    never = np.full(len(storage), -1, np.int32)
    edit.add_saves(storage, before=end[block] + 1, until=end[block], call=block, asked=never, turn=never)
