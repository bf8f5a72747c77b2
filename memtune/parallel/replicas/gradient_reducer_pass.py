"""The pass of `gradient_reducer`: averages of gradients among replicas, bucket by bucket."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtune.program import I32, I64, WRITES, Edit, Kind, Phase, Resource, Step

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
    ops = edit.add_ops(
        np.asarray([edit.name_id(each) for each, _ in _OPS], np.int32)[what],
        after=after[row],
        phase=Phase.BACKWARD,
        resource=np.asarray([each for _, each in _OPS], np.uint8)[what],
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
    edit.add_uses(copies[copied], gradients[copied])
    edit.add_uses(copies[copied], storage[copied], mode=WRITES)
    edit.add_uses(reduces[last], storage[last], mode=WRITES)
    edit.storages.held_until[gradients[copied]] = -1
    edit.storages.kind[gradients[copied]] = Kind.TEMPORARY
    order = np.argsort(last[of], kind="stable").astype(np.int32)
    ends = last[of[order]]
    return AveragedGradients(order, storage[order], after[ends], reduces[ends])
