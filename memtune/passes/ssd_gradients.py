"""The pass of `runtime.ssd_gradients`: gradients that have landed on the host are written to SSD, where the step finds them.

It runs between `passes.stream`, which brings them to the host, and `passes.ssd_optimizer`, which reads what is on SSD.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.passes.ssd_optimizer import Away
from memtune.program import FOREVER, I32, READS, WRITES, Kind, Phase, Resource, Step, Tier
from memtune.read_ahead import WRITES as AT_ONCE


def gradients_on_ssd(step: Step, away: Away) -> tuple[Step, Away]:
    """`step` with the gradients of `away` on SSD between landing and the optimizer, and where they are.

    Args:
        step: What `passes.stream` made and left to the optimizer.
        away: Of it.
    """
    parameters = np.flatnonzero(away.gradients >= 0).astype(np.int32)
    if not len(parameters):
        return step, away
    edit, summed = Edit(step), bool((step.producer[away.gradients[parameters]] < 0).any())
    brought = _landed(step, away.gradients[parameters])[1] if summed else step.producer[away.gradients[parameters]]
    parameters = parameters[np.argsort(brought, kind="stable")]
    kept = away.gradients[parameters]
    hosts, copies, adds = _landed(step, kept) if summed else (kept, step.producer[kept], kept)
    n_bytes = step.bytes[hosts]
    if summed:
        places, after = kept, adds
        edit.tier = step.tier.copy()
        edit.tier[kept] = Tier.SSD
        edit.held_until[kept] = FOREVER
        _read_sums(edit, step, kept, hosts, copies, adds)
    else:
        nowhere, forever = np.full(len(kept), -1, np.int32), np.full(len(kept), FOREVER, np.int32)
        places = edit.add_storages(
            n_bytes, producer=nowhere, tier=Tier.SSD, kind=Kind.GRADIENT, held_until=forever, owner=parameters
        )
        after = _arrived(step, copies)
    write = edit.add_ops(
        "memtune.write_ssd_.default", after=after, phase=Phase.BACKWARD, resource=Resource.SSD_WRITE, traffic_bytes=n_bytes
    )
    edit.add_uses(write, hosts)
    edit.add_uses(write, places, mutates=True)
    _release_after(edit, step, after, write, step.kind == Kind.COMMUNICATION)  # units, when a moment begins
    if int(after[-1]) >= int(np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1]):
        edit.hold_to_the_end_of_backward(int(write[-1]))
    edit.held_until[hosts] = -1
    edit.let_go_before(hosts[:-AT_ONCE], write[AT_ONCE:])
    edit.hold_through(hosts[-AT_ONCE:], np.full(len(hosts[-AT_ONCE:]), write[-1], np.int32))
    moved = np.arange(step.n_storages, dtype=np.int32)
    moved[kept] = places
    used_later = step.use_phase == Phase.OPTIMIZER
    edit.use_storage = np.where(used_later, moved[step.use_storage], edit.use_storage).astype(np.int32)
    gradients = away.gradients.copy()
    gradients[parameters] = places
    return edit.done(), replace(away, gradients=gradients)


def _release_after(edit: Edit, step: Step, after: I32, ops: I32, which: npt.NDArray[np.bool_]) -> None:
    """What of the device's storages `which` is let go at `after[i]` is let go at the op `ops[i]`, which comes right after it."""
    op_of = np.full(step.n_ops, -1, np.int32)
    op_of[after] = ops
    ends = which & (step.tier == Tier.DEVICE) & (step.producer >= 0) & (step.end < step.n_ops)
    mine = np.flatnonzero(ends).astype(np.int32)
    until = op_of[step.end[mine]]
    edit.hold_through(mine[until >= 0], until[until >= 0])


def _landed(step: Step, sums: I32) -> tuple[I32, I32, I32]:
    """Of each of `sums` on the host: the gradient that is added to it, the op that brought it, and the addition."""
    row_of = np.full(step.n_storages, -1, np.int32)
    row_of[sums] = np.arange(len(sums))
    in_body = (step.use_phase < Phase.BOUNDARY) & (step.op_resource[step.use_op] == Resource.HOST_THREADS)
    adds = np.flatnonzero((row_of[step.use_storage] >= 0) & (step.use_mutates == WRITES) & in_body)
    add_of = np.full(len(sums), -1, np.int32)
    add_of[row_of[step.use_storage[adds]]] = step.use_op[adds]
    added = np.full(step.n_ops, -1, np.int32)
    reads = np.flatnonzero((step.use_mutates == READS) & in_body)
    added[step.use_op[reads]] = step.use_storage[reads]
    hosts = added[add_of]
    return hosts, step.producer[hosts], add_of


def _read_sums(edit: Edit, step: Step, sums: I32, hosts: I32, copies: I32, adds: I32) -> None:
    """Rule 2: each sum comes to the host while the gradient does; the addition is into the gradient's memory."""
    n_bytes = step.bytes[hosts]
    read = edit.add_ops(
        "memtune.from_ssd.default",
        after=copies,
        phase=Phase.BACKWARD,
        resource=Resource.SSD_READ,
        traffic_bytes=n_bytes,
        prefetch=1,
    )
    edit.add_uses(read, sums)
    _release_after(edit, step, copies, read, np.ones(step.n_storages, bool))  # autograd holds on until the hook returns
    so_far = edit.add_storages(n_bytes, producer=read, tier=Tier.HOST, kind=Kind.GRADIENT, owner=step.owner[hosts])
    row_of = np.full(step.n_ops, -1, np.int32)
    row_of[adds] = np.arange(len(adds))
    row = row_of[step.use_op]
    swapped = np.where(step.use_mutates == WRITES, hosts[row], so_far[row])
    edit.use_storage = np.where(row >= 0, swapped, edit.use_storage).astype(np.int32)


def _arrived(step: Step, copies: I32) -> I32:
    """The op after which each copy is finished: the device lets go of its source, or the next copy out of that begins."""
    source = _sources(step, copies)
    after = step.end[source].copy()
    shared = np.flatnonzero(source[1:] == source[:-1])  # rows of a block's gradients, which lie side by side
    after[shared] = copies[shared + 1] - 1
    return after


def _sources(step: Step, copies: I32) -> I32:
    """What each copy reads on the device."""
    found = np.full(step.n_ops, -1, np.int32)
    reads = step.use_mutates == READS
    found[step.use_op[reads]] = step.use_storage[reads]
    return found[copies]
