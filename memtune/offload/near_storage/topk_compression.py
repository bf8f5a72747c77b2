"""Only the largest gradients are sent, what is not sent is added to the next step's (SmartComp; error
feedback).

Lossy. The device keeps one number per parameter besides: what has not been sent. Nothing is lost from the sum
of all gradients: in every step, what is sent and what is kept are, element by element, what was kept before
plus the new gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memtune.offload.near_storage.storage_domains import Segment, sent
from memtune.program import Resource
from memtune.runtime import SeamOp, register, transfer


class Largest:
    """What of each parameter's gradient has not been sent.

    Args:
        parameters: By whose numbers segments know them.
        share: Of each segment's elements, that are sent.
    """

    def __init__(self, parameters: Sequence[Tensor], share: float) -> None:
        self._share = share
        self._kept = [torch.zeros(each.numel(), dtype=each.dtype, device=each.device) for each in parameters]

    def down(self, segment: Segment, gradient: Tensor, slot: Tensor) -> None:
        """Start the largest of `gradient` plus what was kept on their way to `slot`, values first, then
        places in the segment.
        """
        count, places_at = sent(segment, gradient.itemsize, self._share)
        kept = self._kept[segment.parameter][segment.start : segment.start + segment.numel]
        values, places = torch.ops.memtune.largest_(kept, gradient, count)
        torch.ops.memtune.copy_to_host_(slot[: values.nbytes].view(values.dtype), values)
        torch.ops.memtune.copy_to_host_(slot[places_at:][: places.nbytes].view(torch.int32), places)
        transfer.finish(slot)
        transfer.COUNTERS.add("to_updaters", values.nbytes + places.nbytes)


def largest_(kept: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What is behind `torch.ops.memtune.largest_`: values and places (int32) of the `count` largest of `kept`
    + `gradient`.

    Args:
        kept: (elements,) what was not sent before, and after this.
        gradient: (elements,) of this step.
        count: How many are sent.
    """
    kept.add_(gradient)
    found = torch.topk(kept.abs(), count, sorted=False).indices
    values = kept.index_select(0, found)
    kept.index_fill_(0, found, 0)
    return values, found.int()


def fake_largest(kept: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Tensors like those of `largest_`."""
    return gradient.new_empty(count), gradient.new_empty(count, dtype=torch.int32)


register(
    "largest_(Tensor(a!) kept, Tensor gradient, int count) -> (Tensor, Tensor)",
    SeamOp(Resource.COMPUTE),
    largest_,
    fake_largest,
)
