"""The pass of `gradient_reducer`: averages of gradients among replicas, bucket by bucket."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtune.program import I32, I64, WRITES, Edit, Kind, Phase, Resource, Step

_COPY, _REDUCE = range(2)
_NAMES = ("aten.copy_.default", "memtune.all_reduce_.default")


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
    _, bucket, count = np.unique(bucket, return_inverse=True, return_counts=True)
    every = np.arange(len(bucket), dtype=np.int32)
    first, last = (np.empty(len(count), np.int32) for _ in range(2))
    # Of several values for an index numpy keeps the last.
    first[bucket[::-1]], last[bucket] = every[::-1], every
    total = np.bincount(bucket, n_bytes, len(count)).astype(np.int64)
    copied = every[count[bucket] > 1]
    row = np.concatenate([copied, last])
    what = np.repeat([_COPY, _REDUCE], [len(copied), len(last)])
    # At one anchor: the copy that fills a bucket, then its message.
    place = np.lexsort((what, row))
    row, what = row[place], what[place]
    is_copy = what == _COPY
    ops = edit.add_ops(
        np.asarray([edit.name_id(each) for each in _NAMES], np.int32)[what],
        after=after[row],
        phase=Phase.BACKWARD,
        resource=np.asarray([Resource.COMPUTE, Resource.INTRA_LINK], np.uint8)[what],
        traffic_bytes=np.where(is_copy, 2 * n_bytes[row], total[bucket[row]]),
        call=step.ops.call[after[row]],
        group=np.where(is_copy, 0, ranks).astype(np.int32),
    )
    copy_of = np.full(len(bucket), -1, np.int32)
    copy_of[row[is_copy]] = ops[is_copy]
    storage, shared = gradients.copy(), np.flatnonzero(count > 1)
    whole = np.full(len(count), -1, np.int32)
    whole[shared] = edit.add_storages(total[shared], producer=copy_of[first[shared]], kind=Kind.COMMUNICATION)
    storage[copied] = whole[bucket[copied]]
    edit.add_uses(copy_of[copied], gradients[copied])
    more = np.setdiff1d(copied, first)
    edit.add_uses(copy_of[more], storage[more], mode=WRITES)
    message = np.empty(len(count), np.int32)
    message[bucket[row[~is_copy]]] = ops[~is_copy]
    edit.add_uses(message, storage[last], mode=WRITES)
    edit.storages.held_until[gradients[copied]] = -1
    edit.storages.kind[gradients[copied]] = Kind.TEMPORARY
    order = np.argsort(last[bucket], kind="stable").astype(np.int32)
    ends = last[bucket[order]]
    return AveragedGradients(order, storage[order], after[ends], message[bucket[order]])
