"""The pass of `runtime.activations`' move claims: what a block saves goes to the host and comes back when backward asks.

What goes on to SSD is written when its copy has landed and read when it, or what left after it, is fetched (`runtime.shelf`).

It runs after `passes.recompute` and mirrors Rules 2, 6 and 10 there: the same tensors are chosen by the same running sums
(`passes.leaving`), each copy holds its source until the next one starts or the next block ends, and each comes back once.

On the stages of a pipeline (`Stages`) what a stage's own blocks have made moves, and nothing else: what comes in from outside is
held by the schedule, or made by each stage. With `in_slots` copies follow `runtime.slots`: all of a stage's copies back stand
before its backward, and `passes.stage_moves`, which knows the other micro-batches, says how long a source stays; of what goes on
to SSD `passes.stage_shelf` says when its write is over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.passes.calls import join_calls, split_calls
from memtune.passes.come_back import Lookahead, come_ahead, come_back, come_together, hold_locals, shelve
from memtune.passes.leaving import Leaving, MoveClaim, forward_end, leaving, stage_of
from memtune.passes.second_order import read_by_second_order, saved_in_backward
from memtune.pipeline_order import Stages
from memtune.program import I32, Phase, Resource, Step, Tier


def move_activations(
    step: Step,
    claims: list[MoveClaim],
    ssd_ahead: int | None = None,
    ahead: int = 0,
    stages: Stages | None = None,
    *,
    window: int = 0,
) -> Step:
    """`step` with saved activations of the claimed blocks on the host, or on SSD, between forward and backward, call by call.

    Args:
        step: Any step.
        claims: At most one per block.
        ssd_ahead: All but claims that stay on the host go on from there to SSD, and so many tensors are read before they are
            asked for; None: the host keeps them.
        ahead: Tensors that come back from the host before backward asks for them; by the rule of `runtime.come_ahead`.
        stages: Of a pipeline, whose blocks run once each.
        window: The same, and as many are on their way to the host at once; with none of the other three.
    """
    claim_of = {claim.block: claim for claim in claims}
    look = Lookahead(window, window) if window else Lookahead(ahead)
    each = [(call, claim_of[block]) for call, block in enumerate(step.call_block.tolist()) if block in claim_of]
    calls = split_calls(step)
    own = [replace(claim, block=call) for call, claim in each]
    new = _move_calls(calls, own, ops_of_landing(step, stages), ssd_ahead, look, stages)
    return step if new is calls else join_calls(new, step)


def ops_of_landing(step: Step, stages: Stages | None = None) -> I32:
    """(calls,) op after which a copy has landed that was started in each call, n_ops for when backward asks (Rule 6).

    That is the end of the call that autograd sees next, or of the call itself where its block is the last, of all or of a stage.
    """
    end = forward_end(split_calls(step))
    seen = np.sort(end[(step.call_grad == 1) & (end >= 0)])
    following = np.searchsorted(seen, end, side="right")
    lands = np.append(seen, np.int32(step.n_ops))[following]
    last = [len(step.blocks) - 1, *(start - 1 for start in (stages.starts[1:] if stages else ()))]
    return np.where(np.isin(step.call_block, last), end, lands).astype(np.int32)


def _move_calls(
    step: Step, claims: list[MoveClaim], lands_after: I32, ssd_ahead: int | None, look: Lookahead, stages: Stages | None
) -> Step:
    """`move_activations`, with blocks that run once."""
    out = leaving(step, claims, stages)
    storage, block = out.storage, out.block
    if not len(storage):
        return step
    claimed = np.zeros(len(step.blocks) + 1, bool)  # the last entry serves block -1
    claimed[[claim.block for claim in claims if claim.fraction > 0]] = True
    moved = _Moved(storage, block, claimed, stage_of(step, stages))
    in_slots = stages is not None and stages.in_slots
    edit = Edit(step)

    readers, moved_save = _readers_and_saves(step, moved)
    first, asked = _before_backward(step, moved, moved_save) if in_slots else _first_asked(step, moved_save, len(storage))
    last = np.full(min(look.out, len(storage)), step.n_ops, np.int32)
    by_next = np.append(out.before[look.out :], last) <= lands_after[block]
    landing = _Landing(lands_after[block], by_next, int(first.min(initial=step.n_ops)), look.out)
    stay = [claim.block for claim in claims if claim.stays_on_host]
    on = ~np.isin(block, stay) if ssd_ahead is not None else np.zeros(len(storage), bool)
    leave, rest, write = _leave(edit, step, out, landing, on)
    edit.add_uses(leave, storage)
    host = edit.add_storages(out.n_bytes, producer=leave, tier=Tier.HOST)
    kept = _keep_the_rest(edit, step, out, rest)
    _hold_sources(edit, step, out, np.maximum(leave, rest), write, moved, landing)
    if not in_slots:
        _let_go_of_landed(edit, storage, leave, write, landing)

    if in_slots:
        ops = at = come_together(edit, out, first, asked)
        read = leave[:0]
    elif ssd_ahead is None and look.back:
        ops, at = come_ahead(edit, step, out, host, first, asked, look)
        read = leave[:0]
    else:
        ops, read = come_back(edit, step, out, first, asked, on, ssd_ahead or 0, moved.stage[block])
        at = ops
    if on.any():
        there, place = on[asked], np.cumsum(on) - 1
        mine = place[asked[there]], ops[there], read[there]
        host[on] = shelve(edit, out.n_bytes[on], host[on], write[on], *mine, on_stages=stages is not None)
    edit.add_uses(ops, host[asked])
    edit.add_uses(ops[out.is_cut[asked]], kept[asked][out.is_cut[asked]])
    if not in_slots:
        hold_locals(edit, step, storage[asked[at >= 0]], at[at >= 0])
    back = np.full(len(storage), -1, np.int32)
    back[asked] = edit.add_storages(step.bytes[storage[asked]], producer=ops)
    edit.use_storage = np.where(readers >= 0, back[readers], edit.use_storage).astype(np.int32)
    # Some saves are let go without ever being asked for.
    edit.drop_saves((moved_save >= 0) & (step.save_until < first[moved_save]))
    returned = (moved_save >= 0) & (back[moved_save] >= 0)
    edit.save_storage = np.where(returned, back[moved_save], edit.save_storage).astype(np.int32)
    return edit.done()


@dataclass(frozen=True)
class _Landing:
    """When copies land (Rule 6): op after which at the latest, and whether a copy that may not be beside it starts earlier.

    Also what backward asks first, and how many copies are on their way at once.
    """

    after: I32  # (moved,)
    by_next: npt.NDArray[np.bool_]  # (moved,)
    first_asked: int
    at_once: int = 1


@dataclass(frozen=True)
class _Moved:
    """What moves: storages, the block that gave each, and (blocks + 1,) whether a block has a claim, and its stage."""

    storage: I32
    block: I32
    claimed: npt.NDArray[np.bool_]
    stage: I32

    def seen_by(self, step: Step, storages: I32, blocks: I32) -> I32:
        """Row here of each of `storages` where a block in `blocks` finds it moved; -1 for what stays, or another stage moves."""
        index = self.index(step)[storages]
        same = (self.stage[blocks] == self.stage[self.block[index]]) & (blocks >= self.block[index])  # one before has kept it
        return np.where(same & self.claimed[blocks], index, -1).astype(np.int32)

    def index(self, step: Step) -> I32:
        """(m,) row of each storage here, -1 for what stays."""
        index = np.full(step.n_storages, -1, np.int32)
        index[self.storage] = np.arange(len(self.storage), dtype=np.int32)
        return index


def _keep_the_rest(edit: Edit, step: Step, out: Leaving, rest: I32) -> I32:
    """What stays on the device of storages that are cut, in memory of its own from the ops `rest` on; -1 for all others."""
    kept = np.full(len(out.storage), -1, np.int32)
    cut = np.flatnonzero(out.is_cut)
    edit.add_uses(rest[cut], out.storage[cut])
    kept[cut] = edit.add_storages(step.bytes[out.storage[cut]] - out.n_bytes[cut], producer=rest[cut])
    return kept


def _hold_sources(edit: Edit, step: Step, out: Leaving, leave: I32, write: I32, moved: _Moved, landing: _Landing) -> None:
    """An op that saves its own outputs holds all it was given and has made until it has packed the last one."""
    output = out.is_output
    if output.any():
        at = out.before[output] - 1
        last_packed = np.full(step.n_ops, -1, np.int32)
        last_packed[at] = leave[output]  # ascending, so the last one stays
        free_after = _end_without(step, moved)
        waits = np.flatnonzero((free_after < step.n_ops) & (last_packed[np.minimum(free_after, step.n_ops - 1)] >= 0))
        edit.hold_through(waits.astype(np.int32), last_packed[free_after[waits]])
    _hold_over_leavers(edit, step, out, leave, write, landing)


def _let_go_of_landed(edit: Edit, storage: I32, leave: I32, write: I32, landing: _Landing) -> None:
    """Rule 6: a source stays until just before the next copy, or one after that, or through the op after which it lands."""
    by_next, n = landing.by_next, landing.at_once
    landed_by = np.where(write[:-n] >= 0, write[:-n], leave[n:])
    edit.let_go_before(storage[:-n][by_next[:-n]], landed_by[by_next[:-n]])
    late = ~by_next
    edit.hold_through(storage[late], landing.after[late])


def _end_without(step: Step, moved: _Moved) -> I32:
    """(m,) `step.end` as it would be if autograd did not hold what moves."""
    readers, moved_save = _readers_and_saves(step, moved)
    stays = moved_save < 0
    end = np.maximum(step.held_until, step.producer)
    np.maximum.at(end, step.use_storage, np.where(readers < 0, step.use_op, -1))
    np.maximum.at(end, step.save_storage[stays], step.save_until[stays])
    return end


def _hold_over_leavers(edit: Edit, step: Step, out: Leaving, leave: I32, write: I32, landing: _Landing) -> None:
    """What a block's callers hold until it returns is there until the last copy that leaves, or is written, at its end starts."""
    block, end = out.block, forward_end(step)
    at_end = out.before == end[block] + 1
    last_leave = np.full(step.n_ops, -1, np.int32)
    np.maximum.at(last_leave, end[block[at_end]], leave[at_end])
    at_return = ~landing.by_next & (landing.after < step.n_ops) & (write >= 0)
    np.maximum.at(last_leave, landing.after[at_return], write[at_return])
    returns = np.full(step.n_ops, -1, np.int32)
    returns[end[end >= 0]] = np.flatnonzero(end >= 0)
    until = np.clip(step.held_until, 0, step.n_ops - 1)
    held = (step.held_until == until) & (last_leave[until] >= 0) & (_made_in(step) != returns[until])
    edit.hold_through(np.flatnonzero(held).astype(np.int32), last_leave[until[held]])


def _readers_and_saves(step: Step, moved: _Moved) -> tuple[I32, I32]:
    """(u,) and (v,) index of the moved storage that a use or a save finds back from the host, -1 for all others.

    Those are reads in backward or recomputation of a claimed block, and saves in the block itself and in claimed later ones;
    where backward is differentiated itself, also what it saves of what it reads there, and who reads that.
    """
    later = (step.use_phase == Phase.BACKWARD) | (step.use_phase == Phase.RECOMPUTE)
    readers = np.where(later, moved.seen_by(step, step.use_storage, step.op_block[step.use_op]), -1)
    saves, index = moved.seen_by(step, step.save_storage, step.save_block), moved.index(step)
    again = saved_in_backward(step, readers >= 0, (saves < 0) & (index[step.save_storage] >= 0))
    if again.any():
        second_order = (readers < 0) & read_by_second_order(step, again, again | (saves >= 0))
        readers = np.where(second_order, index[step.use_storage], readers)
        saves = np.where(again, index[step.save_storage], saves)
    return readers.astype(np.int32), saves.astype(np.int32)


def _before_backward(step: Step, moved: _Moved, moved_save: I32) -> tuple[I32, I32]:
    """As `_first_asked` for slots: the first op of each one's stage in backward; what left last comes first."""
    backward = np.flatnonzero((step.op_phase == Phase.RECOMPUTE) | (step.op_phase == Phase.BACKWARD)).astype(np.int32)
    stage = moved.stage[step.op_block[backward]]
    begins = np.full(int(moved.stage.max(initial=0)) + 1, step.n_ops, np.int32)
    np.minimum.at(begins, stage[stage >= 0], backward[stage >= 0])
    if len(backward):
        begins[-1] = backward[0]  # the loss and what follows the blocks are the last stage's
    first = begins[moved.stage[moved.block]]
    saved_until = np.full(len(moved.storage), -1, np.int32)
    rows = moved_save >= 0
    np.maximum.at(saved_until, moved_save[rows], step.save_until[rows])
    there = np.flatnonzero(saved_until >= first)[::-1]
    return first, there[np.argsort(first[there], kind="stable")].astype(np.int32)


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


def _leave(edit: Edit, step: Step, out: Leaving, landing: _Landing, on: npt.NDArray[np.bool_]) -> tuple[I32, I32, I32]:
    """Insert the copies to the host, of what is cut that of the rest, of what goes `on` to SSD the write where the copy lands.

    Returns the rows of the three, -1 for none.
    """
    block, before, none = out.block, out.before, np.full(len(out.storage), -1, np.int32)
    if not (on.any() or out.is_cut.any()):
        copies = edit.add_ops(
            "memtune.to_host.default",
            before=before,
            phase=Phase.FORWARD,
            resource=Resource.DEVICE_TO_HOST,
            traffic_bytes=out.n_bytes,
            call=block,
            prefetch=1,  # the side stream waits for the compute stream
        )
        return copies, none, none
    end = forward_end(step)
    returns = np.full(step.n_ops + 1, -1, np.int32)  # the call that returns after each op; the last entry: none
    returns[end[end >= 0]] = np.flatnonzero(end >= 0)
    late = np.where(landing.after < step.n_ops, landing.after + 1, landing.first_asked)
    lands_before = np.where(landing.by_next, np.append(before[1:], step.n_ops), late)
    lands_in = np.where(landing.by_next, np.append(block[1:], -1), returns[landing.after])
    names = [edit.name_id(name) for name in ("memtune.to_host.default", "aten.clone.default", "memtune.to_ssd.default")]
    resources = [Resource.DEVICE_TO_HOST, Resource.COMPUTE, Resource.SSD_WRITE]
    rest_bytes = 2 * (step.bytes[out.storage] - out.n_bytes)  # read and written
    there = np.stack([np.ones(len(on), bool), out.is_cut, on], axis=1)
    place = there.ravel()
    ops = edit.add_ops(  # a copy, that of the rest, the write, the next copy
        np.tile(np.asarray(names, np.int32), len(on))[place],
        before=_in_turn(before, before, lands_before)[place],
        phase=Phase.FORWARD,
        resource=np.tile(np.asarray(resources, np.uint8), len(on))[place],
        traffic_bytes=np.stack([out.n_bytes, rest_bytes, out.n_bytes], axis=1).ravel()[place],
        call=_in_turn(block, block, lands_in)[place],
        prefetch=np.tile(np.asarray([1, 0, 1], np.uint8), len(on))[place],
    )
    rows = np.full(there.shape, -1, np.int32)
    rows[there] = ops
    return rows[:, 0], rows[:, 1], rows[:, 2]


def _in_turn(*columns: npt.NDArray[np.integer]) -> I32:
    return np.stack(columns, axis=1).ravel().astype(np.int32)
