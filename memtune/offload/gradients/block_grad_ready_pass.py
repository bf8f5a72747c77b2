"""Gradients of the blocks' parameters in grad-ready order, for `offload.parameters.parameter_offload_pass`.

Passes average them over replicas, bucket by bucket as `parallel.replicas.GradientReducer` does, or copy them
into the freed place of their weights (PatrickStar).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.program import (
    FOREVER,
    I32,
    I64,
    Edit,
    Kind,
    Mask,
    Phase,
    Resource,
    Step,
    columns_of,
    complete_after,
    gathers_of,
    raw_gradients,
    rows_of_gradients,
)

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class BlockGradients:
    """Gradients of the blocks' parameters as autograd accumulates them, one row each."""

    parameter: I32
    raw: I32
    """The storage that this micro-batch produces."""
    sums: I32
    """The sum that it is added to; -1 in the only or first micro-batch."""
    after: I32
    moment: I32
    n_bytes: I64

    @classmethod
    def from_step(cls, step: Step) -> BlockGradients:
        """Return those of `step`."""
        columns = columns_of(step.parameters)
        if gathers_of(step) is not None:
            rows = rows_of_gradients(step)
            moment = (2 * len(step.blocks) - 1 - columns.block[rows.parameter]).astype(np.int32)
            return cls(rows.parameter, rows.raw, rows.sums, rows.after, moment, rows.n_bytes)
        trained = (columns.gradient >= 0) & (columns.block >= 0) & (raw_gradients(step) >= 0)
        parameters = np.flatnonzero(trained)
        index, raw, sums, after = in_ready_order(step, parameters)
        parameter = parameters[index].astype(np.int32)
        moment = 2 * len(step.blocks) - 1 - columns.block[parameter]
        return cls(parameter, raw, sums, after, moment.astype(np.int32), step.storages.bytes[raw])

    def free_in(self, edit: Edit) -> None:
        """Let gradients be freed after their last use; buckets of an average already are."""
        # Rows beyond are buckets, which the average has added with their own lifetimes.
        trained = self.raw[self.raw < len(edit.storages.held_until)]
        edit.storages.held_until[trained] = -1
        edit.storages.kind[trained] = Kind.TEMPORARY


def in_ready_order(step: Step, parameters: Rows) -> tuple[I32, I32, I32, I32]:
    """Return the gradients of `parameters` as autograd accumulates them.

    Returns:
        (gradients,) indices into `parameters`; what a micro-batch produces; its sum, -1 in the only or first
        micro-batch; and the op after which each is ready.
    """
    columns, raw = columns_of(step.parameters), raw_gradients(step)
    index_of = np.full(step.storages.n, -1, np.int32)
    index_of[columns.gradient[parameters]] = np.arange(len(parameters), dtype=np.int32)
    index = index_of[step.grad_order]
    index = index[index >= 0]
    gradient, made = columns.gradient[parameters][index], raw[parameters][index]
    sums = np.where(step.storages.producer[gradient] < 0, gradient, -1).astype(np.int32)
    after = complete_after(step, gradient, made)
    # Stable: gradients of one op are ready in the order in which autograd returns them.
    order = np.argsort(after, kind="stable")
    return index[order], made[order], sums[order], after[order]


@functools.lru_cache(maxsize=8)
def weights_are_free(step: Step) -> bool:
    """Return whether no op reads a block's weight after the weight's gradient is ready."""
    # False under FSDP2: it may have resharded a weight's rows by then.
    grads = BlockGradients.from_step(step)
    if gathers_of(step) is not None:
        return False
    # By weight: the op after which its gradient is ready.
    after = np.full(step.storages.n, FOREVER, np.int32)
    after[columns_of(step.parameters).storage[grads.parameter]] = grads.after
    return not ((step.uses.op > after[step.uses.storage]) & (step.use_phase < Phase.BOUNDARY)).any()


def averaged(
    edit: Edit, step: Step, grads: BlockGradients, ranks: int, alone: Sequence[int]
) -> BlockGradients:
    """Insert an all-reduce of each block's gradients, and of each of `alone`; return the averaged ones."""
    # As `parallel.replicas.gradient_reducer` does: each is ready when its block's last one is.
    columns = columns_of(step.parameters)
    # One message for each dtype of a block.
    bucket = 16 * columns.block[grads.parameter] + columns.itemsize[grads.parameter]
    # Negative numbers are free: each parameter of `alone` gets a bucket of its own.
    bucket = np.where(np.isin(grads.parameter, alone), -1 - grads.parameter, bucket).astype(np.int32)
    found = average_in_buckets(edit, step, grads.raw, grads.after, grads.n_bytes, bucket, ranks)
    parameter, sums, moment = (each[found.order] for each in (grads.parameter, grads.sums, grads.moment))
    return BlockGradients(parameter, found.storage, sums, found.after, moment, grads.n_bytes[found.order])


def average_on_device(step: Step, resident: Mask, ranks: int) -> Step:
    """Return `step` with an all-reduce of the gradient of each parameter in `resident`, in each micro-batch.

    Args:
        step: One that `offload.parameters.parameter_offload_pass.not_in_layers` accepts.
        resident: (parameters,) parameters of blocks whose gradients are not offloaded.
        ranks: Number of replicas; with one there is nothing to average.
    """
    # The sum up to then is averaged.
    grads = BlockGradients.from_step(step)
    trained = np.flatnonzero(resident[grads.parameter])
    if ranks == 1 or not len(trained):
        return step
    edit, after = Edit(step), grads.after[trained]
    gradients = columns_of(step.parameters).gradient[grads.parameter[trained]]
    alone = np.arange(len(trained), dtype=np.int32)
    found = average_in_buckets(edit, step, gradients, after, grads.n_bytes[trained], alone, ranks)
    if after[-1] == step.backward_end:
        edit.hold_to_the_end_of_backward(int(found.message[-1]))
    return edit.done()


def offload_in_place(edit: Edit, grads: BlockGradients, placed: I32, copies: I32, there: I32) -> None:
    """Free each gradient once it is copied to `there`, the place of its weight, and offload it from there."""
    grads.free_in(edit)
    edit.add_uses(placed, grads.raw, writes=there)
    edit.add_uses(copies, there)


def bytes_in_copies(step: Step) -> I64:
    """Return (n,) bytes of gradients on the device only for their D2H copies, at each op of `step`."""
    downs = (step.ops.name == step.names.index("memtune.to_host.default")) & (
        step.ops.phase == Phase.BACKWARD
    )
    leave = downs[step.uses.op]
    first, needed = np.full(step.storages.n, step.ops.n, np.int32), np.full(step.storages.n, -1, np.int32)
    np.minimum.at(first, step.uses.storage[leave], step.uses.op[leave])  # several copies read a bucket
    np.maximum.at(needed, step.uses.storage[~leave], step.uses.op[~leave])
    gradient = np.unique(step.uses.storage[leave])
    at = first[gradient]
    delta = np.zeros(step.ops.n + 1, np.int64)
    np.add.at(delta, np.maximum(needed[gradient] + 1, at), step.storages.bytes[gradient])
    np.add.at(
        delta, np.minimum(step.freed_after[gradient], step.ops.n - 1) + 1, -step.storages.bytes[gradient]
    )
    found: I64 = np.cumsum(delta[:-1])
    return found


# -- averages among replicas ---------------------------------------------------------------------------------

_ALLOCATE, _COPY, _REDUCE = range(3)
_OPS = (
    ("aten.new_empty.default", Resource.NOTHING),
    ("aten.copy_.default", Resource.COMPUTE),
    ("memtune.all_reduce_.default", Resource.INTRA_LINK),
)


@dataclass(frozen=True, eq=False)
class AveragedGradients:
    """Averaged gradients in the order in which the reducer gives them away, one row each."""

    order: I32
    """The row of each among the gradients that were given."""
    storage: I32
    """Its bucket, or itself if it is alone in its bucket."""
    after: I32
    """The op of the step after which the message of its bucket is inserted."""
    message: I32
    """The op that averages it."""


def average_in_buckets(
    edit: Edit, step: Step, gradients: I32, after: I32, n_bytes: I64, bucket: I32, ranks: int
) -> AveragedGradients:
    """Insert an all-reduce of each bucket of gradients, when its last one is ready.

    Args:
        edit: Of `step`.
        step: Of a replica.
        gradients: (gradients,) storages in grad-ready order; those of buckets with several are freed when
            they are copied.
        after: (gradients,) the op after which each is ready, ascending.
        n_bytes: (gradients,)
        bucket: (gradients,) a number that gradients of one bucket share.
        ranks: Number of replicas.
    """
    _, of, count = np.unique(bucket, return_inverse=True, return_counts=True)
    every = np.arange(len(of), dtype=np.int32)
    first, last = (np.empty(len(count), np.int32) for _ in range(2))
    # Of several values for an index numpy keeps the last.
    first[of[::-1]], last[of] = every[::-1], every
    total = np.bincount(of, n_bytes, len(count)).astype(np.int64)
    shared, copied = np.flatnonzero(count > 1), every[count[of] > 1]
    row = np.concatenate([first[shared], copied, last])
    what = np.repeat([_ALLOCATE, _COPY, _REDUCE], [len(shared), len(copied), len(last)])
    # At one anchor: the bucket's memory, the copy that fills it, then its message.
    place = np.lexsort((what, row))
    row, what = row[place], what[place]
    ops = edit.add_kinds(
        _OPS,
        what,
        after=after[row],
        phase=Phase.BACKWARD,
        traffic_bytes=np.select([what == _COPY, what == _REDUCE], [2 * n_bytes[row], total[of[row]]], 0),
        call=step.ops.call[after[row]],
        group=np.where(what == _REDUCE, ranks, 0).astype(np.int32),
    )
    allocates, copies, reduces = (np.full(len(of), -1, np.int32) for _ in range(3))
    for kind, found in enumerate((allocates, copies, reduces)):
        found[row[what == kind]] = ops[what == kind]
    whole, storage = np.full(len(count), -1, np.int32), gradients.copy()
    whole[shared] = edit.add_storages(
        total[shared], producer=allocates[first[shared]], kind=Kind.COMMUNICATION
    )
    storage[copied] = whole[of[copied]]
    edit.add_uses(copies[copied], gradients[copied], writes=storage[copied])
    edit.add_uses(reduces[last], writes=storage[last])
    edit.storages.held_until[gradients[copied]] = -1
    edit.storages.kind[gradients[copied]] = Kind.TEMPORARY
    order = np.argsort(last[of], kind="stable").astype(np.int32)
    ends = last[of[order]]
    return AveragedGradients(order, storage[order], after[ends], reduces[ends])
