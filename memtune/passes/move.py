"""The pass of `runtime.activations`' move claims: what a block saves goes to the host and comes back when backward asks.

What goes on to SSD is written when its copy has landed and read when it, or what left after it, is fetched (`runtime.shelf`).

It runs after `passes.recompute` and mirrors Rules 2 and 6 there: the same tensors are chosen by the same running sums,
each copy holds its source until the next one starts or the next block ends, and each comes back once.

On the stages of a pipeline (`Stages`) what a stage's own blocks have made moves, and nothing else: what comes in from outside is
held by the schedule, or made by each stage. With `in_slots` copies follow `runtime.slots`: all of a stage's copies back stand
before its backward, and `passes.stage_moves`, which knows the other micro-batches, says how long a source stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memtune.calls import INPUTS, Call
from memtune.edit import Edit
from memtune.passes.calls import join_calls, split_calls
from memtune.passes.come_back import Lookahead, come_ahead, come_back, come_together, hold_locals, shelve
from memtune.passes.recompute import calls_of
from memtune.passes.second_order import read_by_second_order, saved_in_backward
from memtune.pipeline_order import Stages
from memtune.program import FOREVER, I32, Phase, Resource, Step, Tier


@dataclass(frozen=True)
class MoveClaim:
    """What one block gives to the host: a fraction of its claimable bytes, no tensor under `min_bytes`."""

    block: int
    fraction: float
    min_bytes: int = 0
    only: frozenset[Call] | None = None
    """Calls whose outputs are claimable, `INPUTS` for what the block was called with; None: everything is."""
    stays_on_host: bool = False
    """Does not go on where others go on to SSD."""


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
    end = _forward_end(split_calls(step))
    seen = np.sort(end[(step.call_grad == 1) & (end >= 0)])
    following = np.searchsorted(seen, end, side="right")
    lands = np.append(seen, np.int32(step.n_ops))[following]
    last = [len(step.blocks) - 1, *(start - 1 for start in (stages.starts[1:] if stages else ()))]
    return np.where(np.isin(step.call_block, last), end, lands).astype(np.int32)


def stage_of(step: Step, stages: Stages | None) -> I32:
    """(blocks + 1,) stage of each block, all one without stages; the last entry is for no block."""
    of = np.zeros(len(step.blocks), np.int32)
    if stages is not None:
        of = (np.searchsorted(np.asarray(stages.starts), np.arange(len(step.blocks)), side="right") - 1).astype(np.int32)
    return np.append(of, np.int32(-1))


def _move_calls(
    step: Step, claims: list[MoveClaim], lands_after: I32, ssd_ahead: int | None, look: Lookahead, stages: Stages | None
) -> Step:
    """`move_activations`, with blocks that run once."""
    rows = _chosen_rows(step, claims, stages)
    if not len(rows):
        return step
    storage, block = step.save_storage[rows], step.save_block[rows]
    n_bytes = step.bytes[storage]
    claimed = np.zeros(len(step.blocks) + 1, bool)  # the last entry serves block -1
    claimed[[claim.block for claim in claims if claim.fraction > 0]] = True
    moved = _Moved(storage, block, claimed, stage_of(step, stages))
    in_slots = stages is not None and stages.in_slots
    edit = Edit(step)

    readers, moved_save = _readers_and_saves(step, moved)
    first, asked = _before_backward(step, moved, moved_save) if in_slots else _first_asked(step, moved_save, len(storage))
    last = np.full(min(look.out, len(rows)), step.n_ops, np.int32)
    by_next = np.append(step.save_before[rows][look.out :], last) <= lands_after[block]
    landing = _Landing(lands_after[block], by_next, int(first.min(initial=step.n_ops)), look.out)
    stay = [claim.block for claim in claims if claim.stays_on_host]
    on = ~np.isin(block, stay) if ssd_ahead is not None else np.zeros(len(rows), bool)
    leave, write = _leave(edit, step, rows, landing, on)
    edit.add_uses(leave, storage)
    host = edit.add_storages(n_bytes, producer=leave, tier=Tier.HOST)
    _hold_sources(edit, step, rows, leave, write, moved, landing)
    if not in_slots:
        _let_go_of_landed(edit, storage, leave, write, landing)

    if in_slots:
        ops = at = come_together(edit, step, storage, block, first, asked)
        read = leave[:0]
    elif ssd_ahead is None and look.back:
        ops, at = come_ahead(edit, step, storage, block, first, asked, look)
        read = leave[:0]
    else:
        ops, read = come_back(edit, step, storage, block, first, asked, on, ssd_ahead or 0)
        at = ops
    if on.any():
        there, place = on[asked], np.cumsum(on) - 1
        host[on] = shelve(edit, n_bytes[on], host[on], write[on], place[asked[there]], ops[there], read[there])
    edit.add_uses(ops, host[asked])
    if not in_slots:
        hold_locals(edit, step, storage[asked[at >= 0]], at[at >= 0])
    back = np.full(len(storage), -1, np.int32)
    back[asked] = edit.add_storages(n_bytes[asked], producer=ops)
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


def claimable_rows(step: Step) -> I32:
    """Save rows of what may move (Rules 1 and 2 of `runtime.activations`), in the order in which forward saves them."""
    recomputed = (step.producer >= 0) & (step.op_phase[step.producer] == Phase.RECOMPUTE)
    claimable = ~recomputed & (step.held_until != FOREVER) & (step.tier == Tier.DEVICE)
    claimable[step.written_parts] = False
    rows = np.flatnonzero((step.save_block >= 0) & claimable[step.save_storage] & (step.save_until >= step.save_before))
    # A block's end comes before the next one's start.
    found: I32 = rows[np.lexsort((step.save_block[rows], step.save_before[rows]))].astype(np.int32)
    return found


def _chosen_rows(step: Step, claims: list[MoveClaim], stages: Stages | None) -> I32:
    """First save row of every storage that moves, in the order in which the copies are started."""
    claim_of = {claim.block: claim for claim in claims if claim.fraction > 0}
    rows = claimable_rows(step)
    if stages is not None:
        stage, producer = stage_of(step, stages), step.producer[step.save_storage[rows]]
        rows = rows[(producer >= 0) & (stage[step.op_block[producer]] == stage[step.save_block[rows]])]
    least = np.full(len(step.blocks), FOREVER, np.int64)  # (blocks,) bytes of the smallest tensor that moves
    for block, claim in claim_of.items():
        least[block] = max(claim.min_bytes, 1)
    rows = rows[step.bytes[step.save_storage[rows]] >= least[step.save_block[rows]]]
    rows = rows[_named(step, rows, claims)]
    columns = (rows, step.save_storage[rows], step.save_block[rows], step.bytes[step.save_storage[rows]])
    moved: set[int] = set()
    decided: set[tuple[int, int]] = set()
    seen: dict[int, int] = {}
    gone: dict[int, int] = {}
    chosen: list[int] = []
    for row, storage, block, n_bytes in zip(*(column.tolist() for column in columns), strict=True):
        if block not in claim_of or storage in moved or (block, storage) in decided:
            continue
        decided.add((block, storage))
        seen[block] = seen.get(block, 0) + n_bytes
        if gone.get(block, 0) + n_bytes <= claim_of[block].fraction * seen[block]:
            gone[block] = gone.get(block, 0) + n_bytes
            moved.add(storage)
            chosen.append(row)
    return np.asarray(chosen, np.int32)


def _named(step: Step, rows: I32, claims: list[MoveClaim]) -> npt.NDArray[np.bool_]:
    """(rows,) whether the claim of each save's block lets its storage move."""
    only = {claim.block: claim.only for claim in claims if claim.only is not None}
    if not only:
        return np.ones(len(rows), bool)
    forward = (step.op_phase == Phase.FORWARD) & np.isin(step.op_block, list(only))
    named = np.zeros(step.n_ops + 1, bool)  # the last entry serves what no op made
    for op, block, call in calls_of(step, np.flatnonzero(forward).astype(np.int32)):
        named[op] = call in (only[block] or ())
    inputs = set(zip(step.input_block.tolist(), step.input_storage.tolist(), strict=True))
    blocks, storages = step.save_block[rows], step.save_storage[rows]
    made_here = (step.producer[storages] >= 0) & (step.op_block[step.producer[storages]] == blocks)
    entered = [
        INPUTS in (only.get(block) or ()) and (block, storage) in inputs
        for block, storage in zip(blocks.tolist(), storages.tolist(), strict=True)
    ]
    free = ~np.isin(blocks, list(only))
    found: npt.NDArray[np.bool_] = free | (made_here & named[step.producer[storages]]) | (np.asarray(entered, bool) & ~made_here)
    return found


def _hold_sources(edit: Edit, step: Step, rows: I32, leave: I32, write: I32, moved: _Moved, landing: _Landing) -> None:
    """An op that saves its own outputs holds all it was given and has made until it has packed the last one."""
    before = step.save_before[rows]
    output = step.save_is_output[rows] == 1
    if output.any():
        at = before[output] - 1
        last_packed = np.full(step.n_ops, -1, np.int32)
        last_packed[at] = leave[output]  # ascending, so the last one stays
        free_after = _end_without(step, moved)
        waits = np.flatnonzero((free_after < step.n_ops) & (last_packed[np.minimum(free_after, step.n_ops - 1)] >= 0))
        edit.hold_through(waits.astype(np.int32), last_packed[free_after[waits]])
    _hold_over_leavers(edit, step, rows, leave, write, landing)


def _let_go_of_landed(edit: Edit, storage: I32, leave: I32, write: I32, landing: _Landing) -> None:
    """Rule 6: a source stays until just before the next copy, or one after that, or through the op after which it lands."""
    by_next, n = landing.by_next, landing.at_once
    landed_by = np.where(write[:-n] >= 0, write[:-n], leave[n:])
    edit.let_go_before(storage[:-n][by_next[:-n]], landed_by[by_next[:-n]])
    late = ~by_next
    edit.hold_through(storage[late], landing.after[late])


def _forward_end(step: Step) -> I32:
    """(blocks,) last forward op of each block, -1 where there is none."""
    forward = (step.op_phase == Phase.FORWARD) & (step.op_block >= 0)
    end = np.full(len(step.blocks), -1, np.int32)
    np.maximum.at(end, step.op_block[forward], np.flatnonzero(forward).astype(np.int32))
    return end


def _end_without(step: Step, moved: _Moved) -> I32:
    """(m,) `step.end` as it would be if autograd did not hold what moves."""
    readers, moved_save = _readers_and_saves(step, moved)
    stays = moved_save < 0
    end = np.maximum(step.held_until, step.producer)
    np.maximum.at(end, step.use_storage, np.where(readers < 0, step.use_op, -1))
    np.maximum.at(end, step.save_storage[stays], step.save_until[stays])
    return end


def _hold_over_leavers(edit: Edit, step: Step, rows: I32, leave: I32, write: I32, landing: _Landing) -> None:
    """What a block's callers hold until it returns is there until the last copy that leaves, or is written, at its end starts."""
    block, end = step.save_block[rows], _forward_end(step)
    at_end = step.save_before[rows] == end[block] + 1
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


def _leave(edit: Edit, step: Step, rows: I32, landing: _Landing, on: npt.NDArray[np.bool_]) -> tuple[I32, I32]:
    """Insert the copies to the host and, of those that go `on` to SSD, the write where the copy lands; the rows, -1 for none."""
    n_bytes, block, before = step.bytes[step.save_storage[rows]], step.save_block[rows], step.save_before[rows]
    write = np.full(len(rows), -1, np.int32)
    if not on.any():
        copies = edit.add_ops(
            "memtune.to_host.default",
            before=before,
            phase=Phase.FORWARD,
            resource=Resource.DEVICE_TO_HOST,
            traffic_bytes=n_bytes,
            call=block,
            prefetch=1,  # the side stream waits for the compute stream
        )
        return copies, write
    end = _forward_end(step)
    returns = np.full(step.n_ops + 1, -1, np.int32)  # the call that returns after each op; the last entry: none
    returns[end[end >= 0]] = np.flatnonzero(end >= 0)
    late = np.where(landing.after < step.n_ops, landing.after + 1, landing.first_asked)
    lands_before = np.where(landing.by_next, np.append(before[1:], step.n_ops), late)
    lands_in = np.where(landing.by_next, np.append(block[1:], -1), returns[landing.after])
    names = [edit.name_id(f"memtune.{name}.default") for name in ("to_host", "to_ssd")]
    there = np.stack([np.ones(len(rows), bool), on], axis=1).ravel()
    ops = edit.add_ops(  # a copy, the write of it, the next copy
        np.tile(np.asarray(names, np.int32), len(rows))[there],
        before=_in_turn(before, lands_before)[there],
        phase=Phase.FORWARD,
        resource=np.tile(np.asarray([Resource.DEVICE_TO_HOST, Resource.SSD_WRITE], np.uint8), len(rows))[there],
        traffic_bytes=np.repeat(n_bytes, 2)[there],
        call=_in_turn(block, lands_in)[there],
        prefetch=1,
    )
    is_write = np.tile([False, True], len(rows))[there]
    write[on] = ops[is_write]
    return ops[~is_write], write


def _in_turn(one: I32, other: npt.NDArray[np.integer]) -> I32:
    return np.stack([one, other], axis=1).ravel().astype(np.int32)
