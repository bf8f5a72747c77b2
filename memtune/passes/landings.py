"""When gradients land, of one rank or reduced by several: the order in which they leave the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.early_updates import bucket_ends
from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.block_landings import adding
from memtune.passes.shares import raw_gradients
from memtune.program import FOREVER, I32, I64, Kind, Phase, Resource, Step, Tier


@dataclass(frozen=True, eq=False)
class Landings:
    """Gradients in the order in which they land, all but the witness's; indices are into the parameters that are updated."""

    index: I32
    raw: I32
    """What this micro-batch makes."""
    sums: I32
    """What it is added to, -1 in the only or first micro-batch."""
    after: I32
    bucket: I32
    full: npt.NDArray[np.bool_]
    """Whether this one fills its bucket."""
    watched: int
    """The witness's gradient on the device."""
    adds: I32
    """Ops that add up micro-batches on the device, where the host does it now."""


Rows = npt.NDArray[np.intp]


def parameter_bytes(step: Step) -> I64:
    """(parameters,) of each, or of a rank's rows of it."""
    columns = columns_of(step.parameters)
    return columns.numel * columns.itemsize


def landings_of(step: Step, mine: Rows, watched: int, bucket_bytes: int) -> Landings:
    """When the gradients of the parameters `mine` land, all but that of `mine[watched]`."""
    columns, raw = columns_of(step.parameters), raw_gradients(step)[mine]
    index_of = np.full(step.n_storages, -1, np.int32)
    index_of[columns.gradient[mine]] = np.arange(len(mine), dtype=np.int32)
    index = index_of[step.landing]
    index = index[(index >= 0) & (index != watched)]
    gradient = columns.gradient[mine][index]
    summed = step.producer[gradient] < 0
    after = np.where(summed, adding(step)[gradient], step.ready_after[raw[index]]).astype(np.int32)
    order = np.argsort(after, kind="stable")
    index, after, sums = index[order], after[order], np.where(summed, gradient, -1)[order].astype(np.int32)
    full = np.zeros(len(index), np.int32)
    full[bucket_ends(step.bytes[raw[index]].tolist(), bucket_bytes)] = 1
    bucket, adds = (np.cumsum(full) - full).astype(np.int32), after[sums >= 0]
    stays = int(columns.gradient[mine][watched]) if len(mine) else -1
    return Landings(index, raw[index], sums, after, bucket, full.astype(bool), stays, adds)


def average_landed(edit: Edit, step: Step, leaving: Rows, ranks: int) -> None:
    """Each gradient is averaged over `ranks` replicas as it lands, by the rules of `runtime.average_landed`.

    Args:
        edit: Of `step`.
        step: Of a replica.
        leaving: Parameters whose gradients go down, micro-batch by micro-batch; all others are averaged in their sums.
        ranks: 1: there is nothing to do.
    """
    if ranks == 1:
        return
    gradient, raw = columns_of(step.parameters).gradient, raw_gradients(step)
    rows = np.flatnonzero(gradient >= 0)
    summed = step.producer[gradient[rows]] < 0
    after = np.where(summed, adding(step)[gradient[rows]], step.ready_after[raw[rows]]).astype(np.int32)
    what = np.where(np.isin(rows, leaving), raw[rows], gradient[rows]).astype(np.int32)
    order = np.argsort(after, kind="stable")
    after, what = after[order], what[order]
    average = edit.add_ops(
        "memtune.all_reduce_.default", after=after, phase=Phase.BACKWARD, resource=Resource.INTRA_LINK,
        traffic_bytes=step.bytes[what], call=step.op_call[after], group=ranks,
    )  # fmt: skip
    edit.add_uses(average, what, mutates=True)


def landings_in(edit: Edit, step: Step, mine: Rows, watched: int, bucket_bytes: int, ranks: int, *, late: bool) -> Landings:
    """As `landings_of`, or of several ranks when reductions are over: several gradients are parts of one storage then.

    What adds up reduced gradients is in no storage of their own; sums of theirs are made on the host, and the witness has a copy.
    """
    if ranks == 1:
        return landings_of(step, mine, watched, bucket_bytes)
    columns, reduced = columns_of(step.parameters), reduced_among(step, mine)
    row = mine if "fsdp.chunk_cat.default" in step.names else -mine  # FSDP2's order, else that of `runtime.rows`
    index = np.lexsort((row, reduced.after))
    index = index[index != watched].astype(np.int32)
    sizes, summed = parameter_bytes(step)[mine], columns.gradient[mine] != reduced.raw
    sums = np.full(len(index), -1, np.int32)
    nowhere = np.full(int(summed[index].sum()), -1, np.int32)
    sums[summed[index]] = edit.add_storages(
        sizes[index][summed[index]],
        producer=nowhere,
        tier=Tier.HOST,
        kind=Kind.GRADIENT,
        owner=mine[index][summed[index]].astype(np.int32),
        held_until=np.full(len(nowhere), FOREVER if late else -1, np.int32),
    )
    on_device = columns.gradient[mine][summed]
    edit.bytes[on_device], edit.held_until[on_device] = 0, -1
    full = np.zeros(len(index), np.int32)
    full[bucket_ends(sizes[index].tolist(), bucket_bytes)] = 1
    bucket, after = (np.cumsum(full) - full).astype(np.int32), reduced.after[index]
    stays = kept_alone(edit, step, reduced, watched, int(sizes[watched]), bool(summed[watched]))
    return Landings(index, reduced.raw[index], sums, after, bucket, full.astype(bool), stays, reduced.adds)


def landed(step: Step, mine: Rows, watched: int, ranks: int) -> tuple[I32, I32]:
    """Which of the parameters `mine` have gradients that leave, and the op after which each is complete."""
    if ranks == 1:
        there = landings_of(step, mine, watched, 0)
        return there.index, there.after
    index = np.flatnonzero(np.arange(len(mine)) != watched).astype(np.int32)
    return index, reduced_among(step, mine).after[index]


@dataclass(frozen=True, eq=False)
class Reduced:
    """Gradients that ranks have reduced; (mine,) each but for `adds`."""

    raw: I32
    """What this micro-batch's reduction makes."""
    after: I32
    adds: I32
    """Ops that add it to what earlier micro-batches have left."""


def reduced_among(step: Step, mine: Rows) -> Reduced:
    """What several ranks' reductions have made of the gradients of the parameters `mine`."""
    gradient = columns_of(step.parameters).gradient[mine]
    written = np.full(step.n_storages, -1, np.int32)
    writes = np.flatnonzero((step.use_mutates == 1) & (step.use_phase < Phase.OPTIMIZER))
    np.maximum.at(written, step.use_storage[writes], step.use_op[writes])
    is_sum = np.zeros(step.n_storages, bool)
    is_sum[gradient[step.producer[gradient] < 0]] = True
    adds = np.unique(step.use_op[writes[is_sum[step.use_storage[writes]]]]).astype(np.int32)
    added = np.full(step.n_ops, -1, np.int32)
    reads = step.use_mutates == 0
    added[step.use_op[reads]] = step.use_storage[reads]
    after = written[gradient]
    return Reduced(np.where(is_sum[gradient], added[after], gradient).astype(np.int32), after, adds)


def kept_alone(edit: Edit, step: Step, reduced: Reduced, index: int, n_bytes: int, summed: bool) -> int:
    """A storage for the gradient `index` that stays on the device, and the op that fills it."""
    raw, after = reduced.raw[index : index + 1], reduced.after[index : index + 1]
    if not summed and int(edit.bytes[raw[0]]) == n_bytes:
        return int(raw[0])
    op = edit.add_ops(
        "aten.add_.Tensor" if summed else "aten.clone.default",
        after=after,
        phase=step.op_phase[after],
        traffic_bytes=(3 if summed else 2) * n_bytes,
        stream=step.op_stream[after],
    )
    producer = np.full(1, -1, np.int32) if summed else op
    alone = edit.add_storages(np.asarray([n_bytes]), producer=producer, kind=Kind.GRADIENT)
    edit.add_uses(op, raw)
    if summed:
        edit.add_uses(op, alone, mutates=True)
    return int(alone[0])


def end_of_backward(step: Step, landings: Landings) -> int:
    """Its last op, or that of what is reduced once per step when it ends."""
    last = int(np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1])
    return max(last, int(landings.after[-1])) if len(landings.after) else last
