"""Top-k gradient compression with error feedback (SmartComp): only the largest gradients are sent. Lossy.

The device keeps a residual per parameter: gradients that were not sent, which are added to the next step's.
In every step, sent gradients plus the new residual equal the old residual plus the new gradient, element by
element, so no gradient is lost from the sum over all steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memtune.offload.near_storage.storage_domains import Segment, topk_layout
from memtune.program import Resource
from memtune.runtime import SeamOp, register, transfer


class TopKCompression:
    """The residual of each parameter, and the transfer of its largest gradients.

    Args:
        parameters: In the order of the segments' parameter numbers.
        share: Share of each segment's elements that is sent.
    """

    def __init__(self, parameters: Sequence[Tensor], share: float) -> None:
        self._share = share
        self._residual = [
            torch.zeros(each.numel(), dtype=each.dtype, device=each.device) for each in parameters
        ]

    def start_offload(self, segment: Segment, gradient: Tensor, slot: Tensor) -> None:
        """Start the D2H copies of the largest elements of `gradient` plus residual: values, indices."""
        count, places_at = topk_layout(segment, gradient.itemsize, self._share)
        kept = self._residual[segment.parameter][segment.start : segment.start + segment.numel]
        values, places = torch.ops.memtune.largest_(kept, gradient, count)
        torch.ops.memtune.copy_to_host_(slot[: values.nbytes].view(values.dtype), values)
        torch.ops.memtune.copy_to_host_(slot[places_at:][: places.nbytes].view(torch.int32), places)
        transfer.finish(slot)
        transfer.COUNTERS.add("to_updaters", values.nbytes + places.nbytes)


def largest_(kept: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return values and indices (int32) of the `count` largest elements of `kept` + `gradient`.

    Args:
        kept: (elements,) The residual; updated in place.
        gradient: (elements,) Gradient of this step.
        count: Number of elements that are sent.
    """
    # The rest is the new residual `kept`, which the next step's gradient is added to.
    kept.add_(gradient)
    # The order of the indices has no meaning here, and sorting costs time.
    found = torch.topk(kept.abs(), count, sorted=False).indices
    values = kept.index_select(0, found)
    kept.index_fill_(0, found, 0)
    return values, found.int()


def fake_largest(kept: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return tensors like those of `largest_`."""
    return gradient.new_empty(count), gradient.new_empty(count, dtype=torch.int32)


register(
    "largest_(Tensor(a!) kept, Tensor gradient, int count) -> (Tensor, Tensor)",
    SeamOp(Resource.COMPUTE),
    largest_,
    fake_largest,
)
