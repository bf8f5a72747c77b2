"""Pass of claims on saved tensors: packs them in forward and unpacks them in backward, as their policies say.

Operators, resources, tiers and bytes are those that the policy declares
(`memtune.program.saved_tensor_policy`): copies to the host, to SSD, or compression in place.

It runs after `activations.recompute.recompute_pass` and mirrors Rules 2, 6 and 10 of
`activations.recompute.activation_table`: the same running sums select the tensors
(`activations.offload.selection_plan`), each copy holds its source until the next copy starts or the next
block ends, and each tensor is reloaded once. A tensor that is spilled to SSD is written when its copy to the
host is complete, and read when it, or a tensor offloaded after it, is fetched
(`activations.offload.ssd_spill`).

On pipeline stages (`Stages`) only the outputs of a stage's own blocks are offloaded: the schedule holds the
stage's inputs anyway, or each stage computes them. With `in_slots` copies follow
`activations.offload.pipeline_slots`: all reloads of a stage are inserted before its backward.
`activations.offload.pipeline_slots_pass`, which knows the other micro-batches, sets how long sources are held
and when SSD writes are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memtune.activations.offload.selection_plan import (
    OffloadClaim,
    OffloadSelection,
    forward_end,
    select_offloads,
    stage_of,
)
from memtune.program import (
    I32,
    I64,
    TO_HOST,
    TO_SSD,
    WRITES_IN_FLIGHT,
    Edit,
    Hop,
    Phase,
    Resource,
    Stages,
    Step,
    Tier,
    join_calls,
    read_by_second_order,
    saved_in_backward,
    split_calls,
    ssd_spill_reads,
)


def move_activations(
    step: Step,
    claims: list[OffloadClaim],
    ssd_prefetch: int = 0,
    prefetch: int = 0,
    stages: Stages | None = None,
    *,
    window: int = 0,
) -> Step:
    """Return `step` with saved activations of claimed blocks packed after forward.

    Args:
        step: Any step.
        claims: At most one per block; their policies begin with the same hop.
        ssd_prefetch: Number of spilled tensors to read before backward reads them.
        prefetch: Number of tensors to prefetch from the host, by the rule of `activations.offload.prefetch`.
        stages: Stages of a pipeline, whose blocks run once each.
        window: Number of tensors to prefetch, and of copies to the host in flight; excludes the other three.
    """
    claim_of = {claim.block: claim for claim in claims}
    look = Lookahead(window, window) if window else Lookahead(prefetch)
    each = [
        (call, claim_of[block]) for call, block in enumerate(step.calls.block.tolist()) if block in claim_of
    ]
    calls = split_calls(step)
    # Rules are per call: a block that runs twice saves, copies and reloads twice.
    own = [replace(claim, block=call) for call, claim in each]
    new = _move_calls(calls, own, copy_end_ops(step, stages), ssd_prefetch, look, stages)
    return step if new is calls else join_calls(new, step)


def copy_end_ops(step: Step, stages: Stages | None = None) -> I32:
    """Return (calls,) the op after which copies started in each call are complete (Rule 6).

    That is the end of the next call that autograd records, or of the call itself if its block is the last of
    all or of a stage; n_ops if only backward's first read completes them.
    """
    end = forward_end(split_calls(step))
    seen = np.sort(end[(step.calls.grad_enabled == 1) & (end >= 0)])
    following = np.searchsorted(seen, end, side="right")
    ready = np.append(seen, np.int32(step.ops.n))[following]
    last = [len(step.blocks) - 1, *(start - 1 for start in (stages.starts[1:] if stages else ()))]
    return np.where(np.isin(step.calls.block, last), end, ready).astype(np.int32)


def _move_calls(
    step: Step,
    claims: list[OffloadClaim],
    ends_after: I32,
    ssd_prefetch: int,
    look: Lookahead,
    stages: Stages | None,
) -> Step:
    """Apply `move_activations` to blocks that run once each."""
    out = select_offloads(step, claims, stages)
    storage, block = out.storage, out.block
    if not len(storage):
        return step
    claimed = np.zeros(len(step.blocks) + 1, bool)  # the last entry serves block -1
    claimed[[claim.block for claim in claims if claim.fraction > 0]] = True
    # The order below is that of the ops in the step: copies out, what they hold, reloads, spills, readers.
    moved = _Offloaded(storage, block, claimed, stage_of(step, stages))
    hop = claims[0].policy.hops[0]
    packed = hop.packed_bytes(out.n_bytes, step.storages.float_bytes[storage])
    in_slots = stages is not None and stages.in_slots
    edit = Edit(step)

    readers, moved_save = _readers_and_saves(step, moved)
    first, asked = (
        _before_backward(step, moved, moved_save)
        if in_slots
        else _first_asked(step, moved_save, len(storage))
    )
    copy_ends = _CopyEnds.from_offloads(step, out, ends_after[block], first, look.out)
    spilled = [claim.block for claim in claims if claim.policy.spills]
    on = np.isin(block, spilled)
    traffic = hop.pack_traffic(out.n_bytes, packed)
    d2h, rest, write = _insert_offloads(edit, step, out, hop, traffic, copy_ends, on)
    edit.add_uses(d2h, storage)
    host = edit.add_storages(packed, producer=d2h, tier=hop.tier)
    kept = _keep_cut_bytes(edit, step, out, rest)
    _hold_sources(edit, step, out, np.maximum(d2h, rest), write, moved, copy_ends)
    if hop.is_copy and not in_slots:
        _free_sources(edit, step, out, d2h, write, copy_ends)

    if in_slots:
        ops = at = insert_stage_reloads(edit, out, first, asked)
        read = d2h[:0]
    elif look.back and not spilled:
        ops, at = insert_prefetches(edit, step, out, host, first, asked, look)
        read = d2h[:0]
    else:
        by_stage = moved.stage[block]
        ops, read = insert_reloads(edit, step, out, hop, traffic, first, asked, on, ssd_prefetch, by_stage)
        at = ops
    if on.any():
        there, place = on[asked], np.cumsum(on) - 1
        mine = place[asked[there]], ops[there], read[there]
        host[on] = insert_ssd_spill(
            edit, out.n_bytes[on], host[on], write[on], *mine, on_stages=stages is not None
        )
    edit.add_uses(ops, host[asked])
    edit.add_uses(ops[out.is_cut[asked]], kept[asked][out.is_cut[asked]])
    if not in_slots:
        # On stages all reloads precede backward, so no second run is in progress.
        hold_locals(edit, step, storage[asked[at >= 0]], at[at >= 0])
    back = np.full(len(storage), -1, np.int32)
    back[asked] = edit.add_storages(step.storages.bytes[storage[asked]], producer=ops)
    edit.set_uses(storage=np.where(readers >= 0, back[readers], edit.uses.storage).astype(np.int32))
    # Autograd may drop a save without ever unpacking it.
    edit.drop_saves((moved_save >= 0) & (step.saves.held_until < first[moved_save]))
    # The save holds the reloaded copy from here on; the original is free after its copy.
    returned = (moved_save >= 0) & (back[moved_save] >= 0)
    edit.set_saves(storage=np.where(returned, back[moved_save], edit.saves.storage).astype(np.int32))
    return edit.done()


@dataclass(frozen=True)
class _CopyEnds:
    """Completion of copies to the host (Rule 6)."""

    after: I32  # (moved,) op after which each is complete unless a later copy completes it
    by_next: npt.NDArray[np.bool_]  # (moved,) a later copy completes it
    first_asked: I32  # (moved,) op of the first reload that follows each copy
    at_once: int = 1

    @classmethod
    def from_offloads(
        cls, step: Step, out: OffloadSelection, complete: I32, first: I32, at_once: int
    ) -> _CopyEnds:
        """Return the ends of copies that are complete after the ops `complete` at the latest."""
        # Beyond all ends, so that a copy that only backward completes is not taken for one with a later copy.
        last = np.full(min(at_once, len(out.storage)), step.ops.n + 1, np.int32)
        # Whichever comes first completes a copy: a later copy, or the end of the next call. Copies of a
        # call's last saves start before the call ends.
        by_next = np.append(out.before[at_once:], last) <= complete
        in_call = np.append(_at_end(step, out)[at_once:], np.full(len(last), -1, np.int32))
        by_next |= (in_call == complete) & (complete < step.ops.n)
        # Of each its own: a backward inside the loss has read others before.
        reads = np.append(np.unique(first), np.int32(step.ops.n))
        return cls(complete, by_next, reads[np.searchsorted(reads, out.before)], at_once)


@dataclass(frozen=True)
class _Offloaded:
    """The offloaded storages.

    Args:
        storage: (moved,) storages.
        block: (moved,) block whose claim offloads each.
        claimed: (blocks + 1,) whether each block has a claim.
        stage: (blocks + 1,) stage of each block.
    """

    storage: I32
    block: I32
    claimed: npt.NDArray[np.bool_]
    stage: I32

    def seen_by(self, step: Step, storages: I32, blocks: I32) -> I32:
        """Return the row here of each of `storages` if a block in `blocks` finds it offloaded, else -1."""
        # A storage that another stage offloads is resident for this one.
        index = self.index(step)[storages]
        # A block before the one that offloads the storage has saved it while it was resident.
        same = (self.stage[blocks] == self.stage[self.block[index]]) & (blocks >= self.block[index])
        return np.where(same & self.claimed[blocks], index, -1).astype(np.int32)

    def index(self, step: Step) -> I32:
        """Return (m,) the row of each storage here, -1 for resident ones."""
        index = np.full(step.storages.n, -1, np.int32)
        index[self.storage] = np.arange(len(self.storage), dtype=np.int32)
        return index


def _keep_cut_bytes(edit: Edit, step: Step, out: OffloadSelection, rest: I32) -> I32:
    """Return device copies of the kept bytes of cut storages, made by the ops `rest`; -1 for others."""
    kept = np.full(len(out.storage), -1, np.int32)
    cut = np.flatnonzero(out.is_cut)
    edit.add_uses(rest[cut], out.storage[cut])
    kept[cut] = edit.add_storages(
        step.storages.bytes[out.storage[cut]] - out.n_bytes[cut], producer=rest[cut]
    )
    return kept


def _hold_sources(
    edit: Edit,
    step: Step,
    out: OffloadSelection,
    d2h: I32,
    write: I32,
    moved: _Offloaded,
    copy_ends: _CopyEnds,
) -> None:
    """Hold the arguments and outputs of an op that saves its own outputs until it has packed the last one."""
    # Such an op packs inside its own kernel call, so its arguments are still on the C++ stack.
    output = out.is_output
    if output.any():
        at = out.before[output] - 1
        last_packed = np.full(step.ops.n, -1, np.int32)
        last_packed[at] = d2h[output]  # ascending, so the last assignment wins
        free_after = _end_without(step, moved)
        waits = np.flatnonzero(
            (free_after < step.ops.n) & (last_packed[np.minimum(free_after, step.ops.n - 1)] >= 0)
        )
        edit.hold_through(waits.astype(np.int32), last_packed[free_after[waits]])
    _hold_until_copied(edit, step, out, d2h, write, copy_ends)


def _free_sources(
    edit: Edit, step: Step, out: OffloadSelection, d2h: I32, write: I32, copy_ends: _CopyEnds
) -> None:
    """Free each source just before the copy that completes its own: the next, or `at_once`-th (Rule 6)."""
    # A source without such a copy is held through the op after which its copy is complete, and the copies of
    # that op's outputs.
    storage, by_next, n = out.storage, copy_ends.by_next, copy_ends.at_once
    completed_by = np.where(write[:-n] >= 0, write[:-n], d2h[n:])
    edit.release_before(storage[:-n][by_next[:-n]], completed_by[by_next[:-n]])
    by_call = ~by_next
    # No copy follows in time: the hook at the end of the next call waits for it, or the first read of
    # backward.
    until = np.minimum(copy_ends.after[by_call], copy_ends.first_asked[by_call] - 1)
    last_d2h = _last_copies(step, out, d2h)[until]
    edit.hold_through(storage[by_call], np.where(last_d2h >= 0, last_d2h, until).astype(np.int32))


def _at_end(step: Step, out: OffloadSelection) -> I32:
    """Return (moved,) the last op of the call that copies each storage after it; -1 for earlier copies."""
    end = forward_end(step)[out.block]
    return np.where(out.before == end + 1, end, -1).astype(np.int32)


def _last_copies(step: Step, out: OffloadSelection, d2h: I32) -> I32:
    """Return (n,) by last op of a call the last copy after it, -1 for none."""
    at, last = _at_end(step, out), np.full(step.ops.n, -1, np.int32)
    np.maximum.at(last, at[at >= 0], d2h[at >= 0])
    return last


def _end_without(step: Step, moved: _Offloaded) -> I32:
    """Return (m,) `step.freed_after` as it would be if autograd did not hold the offloaded storages."""
    readers, moved_save = _readers_and_saves(step, moved)
    resident = moved_save < 0
    end = np.maximum(step.storages.held_until, step.storages.producer)
    np.maximum.at(end, step.uses.storage, np.where(readers < 0, step.uses.op, -1))
    np.maximum.at(end, step.saves.storage[resident], step.saves.held_until[resident])
    return end


def _hold_until_copied(
    edit: Edit, step: Step, out: OffloadSelection, d2h: I32, write: I32, copy_ends: _CopyEnds
) -> None:
    """Hold arguments of a block's callers through the last copy or write at its end."""
    end, last_d2h = forward_end(step), _last_copies(step, out, d2h)
    at_return = ~copy_ends.by_next & (copy_ends.after < step.ops.n) & (write >= 0)
    np.maximum.at(last_d2h, copy_ends.after[at_return], write[at_return])
    returns = np.full(step.ops.n, -1, np.int32)
    returns[end[end >= 0]] = np.flatnonzero(end >= 0)
    until = np.clip(step.storages.held_until, 0, step.ops.n - 1)
    held = (step.storages.held_until == until) & (last_d2h[until] >= 0) & (_made_in(step) != returns[until])
    edit.hold_through(np.flatnonzero(held).astype(np.int32), last_d2h[until[held]])


def _readers_and_saves(step: Step, moved: _Offloaded) -> tuple[I32, I32]:
    """Return (u,) and (v,): the offloaded storage that each use or save finds reloaded, -1 for all others."""
    # Those are reads in backward or recomputation of a claimed block, and saves in the block itself and
    # in later claimed ones. If backward is differentiated again, also what it saves of its reads, and
    # the readers of that.
    later = (step.use_phase == Phase.BACKWARD) | (step.use_phase == Phase.RECOMPUTE)
    readers = np.where(later, moved.seen_by(step, step.uses.storage, step.ops.block[step.uses.op]), -1)
    saves, index = moved.seen_by(step, step.saves.storage, step.saves.block), moved.index(step)
    # A checkpoint of the user's own runs its function again on arguments that Python holds: before autograd
    # unpacks any, those are the originals.
    first, _ = _first_asked(step, saves, len(moved.storage))
    readers = np.where((readers >= 0) & (step.uses.op >= first[readers]), readers, -1)
    # Double backward: what backward saves of a reloaded tensor is the reloaded copy, not the original.
    again = saved_in_backward(step, readers >= 0, (saves < 0) & (index[step.saves.storage] >= 0))
    if again.any():
        second_order = (readers < 0) & read_by_second_order(step, again, again | (saves >= 0))
        readers = np.where(second_order, index[step.uses.storage], readers)
        saves = np.where(again, index[step.saves.storage], saves)
    return readers.astype(np.int32), saves.astype(np.int32)


def _before_backward(step: Step, moved: _Offloaded, moved_save: I32) -> tuple[I32, I32]:
    """Return `_first_asked` for pipeline slots: the first op of a stage's backward, last offloaded first."""
    backward = np.flatnonzero(
        (step.ops.phase == Phase.RECOMPUTE) | (step.ops.phase == Phase.BACKWARD)
    ).astype(np.int32)
    stage = moved.stage[step.ops.block[backward]]
    begins = np.full(int(moved.stage.max(initial=0)) + 1, step.ops.n, np.int32)
    np.minimum.at(begins, stage[stage >= 0], backward[stage >= 0])
    if len(backward):
        begins[-1] = backward[0]  # the loss and the modules after the blocks belong to the last stage
    first = begins[moved.stage[moved.block]]
    saved_until = np.full(len(moved.storage), -1, np.int32)
    rows = moved_save >= 0
    np.maximum.at(saved_until, moved_save[rows], step.saves.held_until[rows])
    # Reversed, because backward wants the last offloaded first; the sort by stage is stable.
    there = np.flatnonzero(saved_until >= first)[::-1]
    return first, there[np.argsort(first[there], kind="stable")].astype(np.int32)


def _first_asked(step: Step, moved_save: I32, count: int) -> tuple[I32, I32]:
    """Return (moved,) the op that first reads each storage, or n_ops, and the storages in that order."""
    rows = np.flatnonzero((moved_save >= 0) & (step.saves.unpacked_before >= 0))
    # One op may unpack several: `unpack_order` is the order in which its node asked for them.
    rows = rows[np.lexsort((rows, step.saves.unpack_order[rows], step.saves.unpacked_before[rows]))]
    moved, at = np.unique(moved_save[rows], return_index=True)
    first = np.full(count, step.ops.n, np.int32)
    first[moved] = step.saves.unpacked_before[rows[at]]
    return first, moved[np.argsort(at)].astype(np.int32)


def _made_in(step: Step) -> I32:
    """Return (m,) the block whose forward produced each storage, -1 for none."""
    return np.where(step.storages.producer >= 0, step.ops.block[step.storages.producer], -1).astype(np.int32)


def _insert_offloads(
    edit: Edit,
    step: Step,
    out: OffloadSelection,
    hop: Hop,
    traffic: I64,
    copy_ends: _CopyEnds,
    on: npt.NDArray[np.bool_],
) -> tuple[I32, I32, I32]:
    """Insert the ops of `hop`, the clones of kept bytes of cut storages, and the SSD writes of `on`.

    Return the rows of the three, -1 for none. An SSD write starts when the copy to the host is complete.
    """
    block, before, none = out.block, out.before, np.full(len(out.storage), -1, np.int32)
    if not (on.any() or out.is_cut.any()):
        copies = edit.add_ops(
            hop.pack,
            before=before,
            phase=Phase.FORWARD,
            resource=hop.pack_on,
            traffic_bytes=traffic,
            call=block,
            prefetch=int(hop.is_copy),  # the side stream waits for the compute stream
        )
        return copies, none, none
    end = forward_end(step)
    returns = np.full(
        step.ops.n + 1, -1, np.int32
    )  # the call that returns after each op; the last entry: none
    returns[end[end >= 0]] = np.flatnonzero(end >= 0)
    by_call = np.where(copy_ends.after < step.ops.n, copy_ends.after + 1, copy_ends.first_asked)
    ends_before = np.where(copy_ends.by_next, np.append(before[1:], step.ops.n), by_call)
    ends_in = np.where(copy_ends.by_next, np.append(block[1:], -1), returns[copy_ends.after])
    names = [edit.name_id(name) for name in (hop.pack, "aten.clone.default", TO_SSD.pack)]
    resources = [hop.pack_on, Resource.COMPUTE, TO_SSD.pack_on]
    rest_bytes = 2 * (step.storages.bytes[out.storage] - out.n_bytes)  # read and written
    there = np.stack([np.ones(len(on), bool), out.is_cut, on], axis=1)
    place = there.ravel()
    ops = edit.add_ops(  # order: D2H copy, clone of its kept bytes, SSD write, next D2H copy
        np.tile(np.asarray(names, np.int32), len(on))[place],
        before=_interleave(before, before, ends_before)[place],
        phase=Phase.FORWARD,
        resource=np.tile(np.asarray(resources, np.uint8), len(on))[place],
        traffic_bytes=np.stack([out.n_bytes, rest_bytes, out.n_bytes], axis=1).ravel()[place],
        call=_interleave(block, block, ends_in)[place],
        prefetch=np.tile(np.asarray([1, 0, 1], np.uint8), len(on))[place],
    )
    rows = np.full(there.shape, -1, np.int32)
    rows[there] = ops
    return rows[:, 0], rows[:, 1], rows[:, 2]


def _interleave(*columns: npt.NDArray[np.integer]) -> I32:
    return np.stack(columns, axis=1).ravel().astype(np.int32)


# Reloads in backward: one by one, before a stage's backward, or prefetched.
@dataclass(frozen=True)
class Lookahead:
    """Numbers of tensors to prefetch, and of copies to the host in flight."""

    back: int = 0
    out: int = 1


def insert_reloads(
    edit: Edit,
    step: Step,
    out: OffloadSelection,
    hop: Hop,
    traffic: I64,
    first: I32,
    asked: I32,
    on: npt.NDArray[np.bool_],
    ssd_prefetch: int,
    stage: I32,
) -> tuple[I32, I32]:
    """Insert reloads just before their first reads, after the SSD reads they start; return both."""
    # A reload belongs to the block whose backward reads the tensor first: a tensor saved by several blocks is
    # reloaded with the last of them. `stage` is that of each tensor; SSD reads are prefetched within a stage.
    fetched, is_read = asked, np.zeros(len(asked), bool)
    moving = asked
    if on.any():
        spilled = asked[on[asked]]
        pairs: list[tuple[int, int, bool]] = []
        starts: dict[int, list[int]] = {}
        is_there = _is_there(out, first)
        for each in np.unique(stage[spilled]).tolist():
            mine = spilled[stage[spilled] == each]
            for fetch, tensor in ssd_spill_reads(
                np.sort(mine).tolist(), mine.tolist(), ssd_prefetch, is_there
            ):
                starts.setdefault(fetch, []).append(tensor)
        for each in asked.tolist():
            pairs += [(each, tensor, True) for tensor in starts.get(each, [])] + [(each, each, False)]
        fetched, moving = (np.asarray([pair[i] for pair in pairs], np.int32) for i in (0, 1))
        is_read = np.asarray([pair[2] for pair in pairs], bool)
    asking = step.ops.block[first[fetched]]
    names = _names(edit, out, hop)[moving]
    if is_read.any():
        names = np.where(is_read, edit.name_id(TO_SSD.unpack), names).astype(np.int32)
    ops = edit.add_ops(
        names,
        before=first[fetched],
        phase=Phase.BACKWARD,
        resource=np.where(is_read, np.uint8(TO_SSD.unpack_on), np.uint8(hop.unpack_on)),
        traffic_bytes=traffic[moving],
        call=np.where(asking >= 0, asking, out.block[fetched]),
        stream=np.where(is_read, 0, 1).astype(np.uint8),  # a reload completes in stream order, without a wait
        prefetch=is_read.astype(np.uint8),
    )
    read = np.full(len(on), -1, np.int32)
    read[moving[is_read]] = ops[is_read]
    return ops[~is_read], read[asked]


def _is_there(out: OffloadSelection, first: I32) -> Callable[[int, int], bool]:
    """Return whether the copy of one tensor starts before another is fetched."""
    starts, fetches = out.before.tolist(), first.tolist()
    return lambda tensor, fetch: starts[tensor] <= fetches[fetch]


def _names(edit: Edit, out: OffloadSelection, hop: Hop = TO_HOST) -> I32:
    """Return the op of each reload; a cut storage is joined with its kept bytes."""
    whole = np.full(len(out.storage), edit.name_id(hop.unpack), np.int32)
    return (
        np.where(out.is_cut, edit.name_id("memtune.to_device_with_tail.default"), whole)
        if out.is_cut.any()
        else whole
    )


def insert_stage_reloads(edit: Edit, out: OffloadSelection, first: I32, asked: I32) -> I32:
    """Insert the reloads of each stage before its backward, on a copy stream."""
    return edit.add_ops(
        _names(edit, out)[asked],
        before=first[asked],
        phase=Phase.BACKWARD,
        resource=Resource.HOST_TO_DEVICE,
        traffic_bytes=out.n_bytes[asked],
        call=out.block[asked],
        prefetch=1,
    )


def insert_prefetches(
    edit: Edit, step: Step, out: OffloadSelection, host: I32, first: I32, asked: I32, look: Lookahead
) -> tuple[I32, I32]:
    """Insert reloads as `insert_reloads` does, with prefetches by the rule of `activations.offload.prefetch`.

    Also return the last copy that each reload starts, in order of `asked`, -1 for none.
    """
    # Prefetches run on a separate stream, after the compute issued so far. Their sources remain on the
    # `host` until they are read and the copies that this starts have begun.
    # Schedules recompute ops, not blocks. A backward that is differentiated has this phase, but no copy_of.
    # A block that runs again asks for its tensors in forward order, one that does not in reverse.
    runs_again = (step.ops.phase == Phase.RECOMPUTE) & (step.ops.copy_of >= 0) & (not step.runs_schedules)
    again, block = np.unique(step.ops.block[runs_again]), out.block
    left = asked[np.lexsort((np.where(np.isin(block[asked], again), -asked, asked), block[asked]))]
    pairs = ssd_spill_reads(left.tolist(), asked.tolist(), look.back, _is_there(out, first))
    fetched, moving = (np.asarray([pair[i] for pair in pairs], np.int32) for i in (0, 1))
    asking, early = step.ops.block[first[fetched]], fetched != moving
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
    rank = np.empty(len(block), np.int32)
    rank[asked] = np.arange(len(asked), dtype=np.int32)
    mine = moving[early]
    before = np.searchsorted(rank[fetched], rank[mine], side="right") - 1  # the last copy started by then
    # A copy started at the same op is inserted after it, so the host source lives until that copy.
    same_place = (before >= 0) & (first[fetched[before]] == first[mine])
    edit.hold_through(host[mine], np.where(same_place, ops[before], first[mine] - 1).astype(np.int32))
    reloads, at = (np.full(len(block), -1, np.int32) for _ in range(2))
    reloads[moving], at[fetched] = (ops, ops)  # the last of several copies at one place wins
    return reloads[asked], at[asked]


def insert_ssd_spill(
    edit: Edit, n_bytes: I64, host: I32, write: I32, asked: I32, back: I32, read: I32, *, on_stages: bool
) -> I32:
    """Insert the tiers of spilled storages; return their host storages after the read."""
    # Host memory is held until the write completes, SSD until the reload. On pipeline stages
    # `activations.offload.pipeline_slots_pass`, which knows the other micro-batches, sets when a write
    # completes.
    spilled = edit.add_storages(n_bytes, producer=write, tier=Tier.SSD)
    edit.add_uses(write, host)
    if not on_stages:
        edit.release_before(host[:-WRITES_IN_FLIGHT], write[WRITES_IN_FLIGHT:])
    if not len(asked):
        return host
    if not on_stages:
        last = host[-WRITES_IN_FLIGHT:]
        edit.release_before(last, read[0])
    edit.add_uses(read, spilled[asked])
    edit.hold_through(spilled[asked], back)
    again = host.copy()
    again[asked] = edit.add_storages(n_bytes[asked], producer=read, tier=Tier.HOST)
    return again


def hold_locals(edit: Edit, step: Step, storage: I32, ops: I32) -> None:
    """Hold local variables of a block's first run while its kept outputs are reloaded in the second run."""
    # Generated code has no frames whose locals could hold anything.
    if step.runs_schedules or not (step.ops.copy_of >= 0).any():
        return
    twin, held = _second_run_storages(step), step.storages.held_until.copy()
    forward = step.use_phase == Phase.FORWARD
    np.maximum.at(held, step.uses.storage[forward], step.uses.op[forward])
    # Pairs of a reloaded storage and one that its block's first run held over the op that made it.
    originals = np.flatnonzero(twin >= 0)
    originals = originals[np.argsort(step.ops.block[step.storages.producer[originals]], kind="stable")]
    made_in = step.ops.block[step.storages.producer[originals]]
    kept_op = step.storages.producer[storage]
    # An op that the second run skips has allocations as copies: what it saved is read by backward alone.
    reloaded = (kept_op >= 0) & ~np.isin(kept_op, step.ops.copy_of)
    ops, kept_op = ops[reloaded], kept_op[reloaded]
    first, stop = (np.searchsorted(made_in, step.ops.block[kept_op], side) for side in ("left", "right"))
    number = np.repeat(np.arange(len(ops)), stop - first)
    mine = originals[
        np.arange(len(number)) + np.repeat(first - np.cumsum(stop - first) + (stop - first), stop - first)
    ]
    inside = (step.storages.producer[mine] < kept_op[number]) & (held[mine] >= kept_op[number])
    edit.hold_through(twin[mine[inside]], ops[number[inside]])


def _second_run_storages(step: Step) -> I32:
    """Return (m,) the storage that the second run makes for each, -1 for none; third runs are ignored."""
    twin = np.full(step.storages.n, -1, np.int32)
    # On the device only: random states are on the host, and may be kept by one of the runs alone.
    made = (step.storages.producer >= 0) & (step.storages.tier == Tier.DEVICE)
    copies = np.flatnonzero(made & (step.ops.copy_of[step.storages.producer] >= 0))
    copied = np.zeros(step.ops.n, bool)
    copied[step.ops.copy_of[step.ops.copy_of >= 0]] = True
    originals = np.flatnonzero(made & copied[step.storages.producer])
    copies = copies[np.lexsort((copies, step.ops.copy_of[step.storages.producer[copies]]))]
    originals = originals[np.lexsort((originals, step.storages.producer[originals]))]
    if len(copies) > len(originals):
        of = step.ops.copy_of[step.storages.producer[copies]]
        n_made = np.bincount(step.storages.producer[originals], minlength=step.ops.n)
        copies = copies[np.arange(len(of)) - np.searchsorted(of, of) < n_made[of]]
    twin[originals] = copies
    return twin
