"""Recordings of the length buckets that the user's `buckets(size)` declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from memtune.autotune.record import Session, start_session
from memtune.program import Recording
from memtune.workload import Workload, tensors_of

Shapes = tuple[tuple[int, ...], ...]
_SMALL, _LARGE = 2, 4
"""Micro-batches at which the inputs' shapes are taken; those at others follow from the two."""


@dataclass(frozen=True)
class BucketRecording:
    """A length bucket's step, and the shapes that the model's forward gets."""

    recording: Recording
    small: Shapes
    large: Shapes

    def inputs(self, micro_batch: int) -> Shapes:
        """Return the shapes of the tensors that the model's forward gets at `micro_batch`."""

        def at(low: int, high: int) -> int:
            return low + (high - low) // (_LARGE - _SMALL) * (micro_batch - _SMALL)

        pairs = zip(self.small, self.large, strict=True)
        return tuple(tuple(map(at, small, large)) for small, large in pairs)


def record_buckets(
    workload: Workload, rung: str, record: Callable[[Workload], Recording], say: Callable[[str], None]
) -> tuple[BucketRecording, ...]:
    """Return the length buckets whose inputs differ from those of the largest batch, smallest first.

    Args:
        workload: The user's.
        rung: Rung on which the workload was recorded.
        record: Records a workload for the device.
        say: Called with one line if there are buckets.

    Raises:
        WorkloadError: A bucket's batch cannot be made or trained on.
    """
    count = len(workload.make_buckets(_SMALL))
    if not count:
        return ()
    say(f"recording {count} length buckets")
    session = start_session(workload, rung)
    largest = _inputs(session, workload, _SMALL)
    found = []
    for index in range(count):
        bucket = workload.of_bucket(index)
        small = _inputs(session, bucket, _SMALL)
        if small != largest:
            found.append(BucketRecording(record(bucket), small, _inputs(session, bucket, _LARGE)))
    return tuple(found)


class _Called(BaseException):
    """Ends the loss function at the call of the model; no `Exception`, which user code may catch."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.shapes = shapes


def _inputs(session: Session, workload: Workload, size: int) -> Shapes:
    """Return the shapes of the tensors that the model's forward gets first, of a batch of `size` samples."""
    # Nothing is computed: the loss function ends at that call. Empty if it never calls the model as a whole.

    def called(_: nn.Module, args: Any, kwargs: Any) -> None:
        raise _Called(tuple(tuple(each.shape) for each in tensors_of((args, kwargs))))

    session = replace(session, workload=workload)
    handle = session.model.register_forward_pre_hook(called, with_kwargs=True)
    try:
        with session.entered():
            workload.loss(session.model, session.batch(size))
    except _Called as call:
        return call.shapes
    finally:
        handle.remove()
    return ()
