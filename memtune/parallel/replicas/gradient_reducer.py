"""One owner of averages among replicas: when a gradient is averaged, over which group, and into what.

- When: a bucket is averaged in one all-reduce as soon as autograd has accumulated its last gradient, in each
  backward. The first backward shows the order of the messages. A bucket that is not full when a later one is
  averaged goes first, with zeros for its missing gradients, so that ranks that use different parameters still
  exchange the same messages. The end of backward averages the rest.
- Over: one process group. Buckets are laid out alike on all ranks.
- Into: each averaged gradient is given to `into`, in the order in which autograd accumulated them. A bucket
  is allocated for its first gradient, and freed when the last view of it is dropped. A bucket of one gradient
  is that gradient: nothing is copied.

Every rank must have every gradient in each backward; `finish` returns those that this rank lacks.

The pass is `average_in_buckets` (`offload.gradients.block_grad_ready_pass`). DDP (`grad_buckets`,
`data_parallel`) differs in what it keeps: its buckets exist as long as the model, and are averaged once per
step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)


@dataclass(eq=False)
class _Bucket:
    """Gradients of one dtype that are averaged in one message."""

    parameters: list[nn.Parameter]
    place: int
    """Its place in the order of messages; -1 while that of a single gradient is unknown."""
    is_averaged: bool = False
    """In this backward."""
    ready: dict[nn.Parameter, None] = field(default_factory=dict)
    """In the order in which autograd accumulated them."""
    whole: Tensor | None = None

    def __post_init__(self) -> None:
        ends = list(itertools.accumulate(each.numel() for each in self.parameters))
        self.numel = ends[-1]
        self._begins = dict(zip(self.parameters, [0, *ends], strict=False))

    def view(self, whole: Tensor, parameter: nn.Parameter) -> Tensor:
        """Return the part of `whole` for the gradient of `parameter`, with its shape and strides."""
        if len(self.parameters) == 1:
            return whole
        return whole.as_strided(parameter.size(), parameter.stride(), self._begins[parameter])


class GradientReducer:
    """Averages gradients among replicas, bucket by bucket.

    Args:
        group: The replicas.
        buckets: Parameters whose gradients are averaged together, in the order of backward; those of each
            dtype if there are several.
        into: Takes a parameter and its averaged gradient.
        device: The device that computes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        buckets: Iterable[Sequence[nn.Parameter]],
        into: Callable[[nn.Parameter, Tensor], None],
        device: torch.device,
    ) -> None:
        self._group, self._into, self._device = group, into, device
        self._buckets = [
            _Bucket([each for each in members if each.dtype is dtype], place if len(members) > 1 else -1)
            for place, members in enumerate(buckets)
            for dtype in dict.fromkeys(each.dtype for each in members)
        ]
        self._place = 0  # of the last bucket that was averaged in this backward
        self._is_ordered, self._averaged = False, dict[_Bucket, None]()
        """True once a complete backward has shown the order; the buckets averaged until then."""
        self._bucket_of = {each: bucket for bucket in self._buckets for each in bucket.parameters}
        self._seen: set[nn.Parameter] = set()  # in this backward
        self.averaged_bytes = 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The replicas."""
        return self._group

    @torch.no_grad()
    def add(self, parameter: nn.Parameter) -> None:
        """Take the gradient of `parameter`, and average the bucket that it fills."""
        bucket, gradient = self._bucket_of[parameter], parameter.grad
        assert gradient is not None
        # The bucket takes it over: autograd accumulates the next one, of another use, from nothing.
        parameter.grad = None
        self._seen.add(parameter)
        # Taken as it is: no copy, and the memory that autograd has allocated is averaged in place.
        if len(bucket.parameters) == 1:
            bucket.whole = gradient
        else:
            if bucket.whole is None:
                bucket.whole = gradient.new_empty(bucket.numel)
            view = bucket.view(bucket.whole, parameter)
            # A parameter that is used again before its bucket is full: autograd would have added both.
            view.add_(gradient) if parameter in bucket.ready else view.copy_(gradient)
        del gradient
        bucket.ready[parameter] = None
        if len(bucket.ready) == len(bucket.parameters):
            self._average_in_order(bucket)

    def _average_in_order(self, bucket: _Bucket) -> None:
        """Average `bucket`, and first those before it, which other ranks may have filled."""
        begin, self._place = self._place, max(self._place, bucket.place)
        # Sorted by place once the order is known: a backward does not walk all buckets for each gradient.
        for each in self._buckets[begin : bucket.place] if self._is_ordered else self._buckets:
            if begin <= each.place < bucket.place and not each.is_averaged:
                self._average(each)
        self._average(bucket)

    def _average(self, bucket: _Bucket) -> None:
        if not self._is_ordered:
            self._averaged[bucket] = None
        whole, ready = bucket.whole, bucket.ready
        if whole is None:
            whole = torch.zeros(bucket.numel, dtype=bucket.parameters[0].dtype, device=self._device)
        bucket.whole, bucket.ready, bucket.is_averaged = None, {}, True
        for each in bucket.parameters if len(ready) < len(bucket.parameters) else ():
            if each not in ready:
                bucket.view(whole, each).zero_()
        torch.ops.memtune.all_reduce_(whole, self._group.group_name, self._group.size(), "avg")
        self.averaged_bytes += whole.nbytes
        given = [bucket.view(whole, each) for each in ready]
        del whole  # each view is the only reference to its part when it is given away
        for each in ready:
            self._into(each, given.pop(0))

    @torch.no_grad()
    def finish(self) -> list[nn.Parameter]:
        """Average the remaining buckets after a backward; return the parameters without a gradient in it."""
        for bucket in self._buckets:
            if bucket.ready:
                self._average_in_order(bucket)
        lacking = [each for each in self._bucket_of if each not in self._seen]
        if not lacking and not self._is_ordered:
            self._buckets, self._is_ordered = list(self._averaged), True
            for place, bucket in enumerate(self._buckets):
                bucket.place = place
        self.abandon()
        return lacking

    def abandon(self) -> None:
        """Drop the gradients of a backward that raised."""
        for bucket in self._buckets:
            bucket.whole, bucket.ready, bucket.is_averaged = None, {}, False
        self._seen, self._place, self._averaged = set(), 0, {}
