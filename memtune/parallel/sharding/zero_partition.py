"""Unsharded parameters with sharded gradients and optimizer state (ZeRO stages 1 and 2), reduced while
autograd runs.

The rules are those of `parallel.sharding.sharded_buckets`. A bucket is reduced when its last gradient is
ready: full ones during backward, the others when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from memtune.parallel.sharding.sharded_buckets import Bucket, Part, ShardAxes, ShardedBuckets
from memtune.runtime import BackwardEnd, Context, call_when_grad_ready


class Partition(ShardedBuckets):
    """Shards gradients and optimizer state of plain parameters, which remain the user's own objects,
    unsharded on every rank.

    Args:
        context: Context of the model; gets the removal of the hooks as `undo`.
        inputs: Trainable parameters of the model.
        axes: Ranks that shard them.
        bucket_cap_mb: Gradients are reduced, and weights gathered, in buckets of about this many MiB.
        every_micro_batch: Reduce after each micro-batch and accumulate shards (ZeRO-2), else reduce the sums
            once (ZeRO-1).
    """

    def __init__(
        self,
        context: Context,
        inputs: Sequence[nn.Parameter],
        axes: ShardAxes,
        *,
        bucket_cap_mb: int,
        every_micro_batch: bool,
    ) -> None:
        super().__init__(
            context, inputs, axes, bucket_cap_mb=bucket_cap_mb, every_micro_batch=every_micro_batch
        )
        self._at_end = BackwardEnd(self._finish, self._give_up)
        self.on_end: Callable[[], None] = lambda: None
        """Called when backward has ended and its gradients are reduced, if this micro-batch reduces."""
        ready: dict[nn.Parameter, Callable[[Any], None]] = {}
        for bucket in self._buckets:
            for part in bucket.parts:
                before, ready[part.parameter] = self._hooks_of(bucket, part)
                context.undo.callback(part.parameter.register_hook(before).remove)
        call_when_grad_ready(context, ready)

    def _hooks_of(
        self, bucket: Bucket, part: Part
    ) -> tuple[Callable[[Tensor], None], Callable[[Tensor], None]]:
        at_end, input_, n_parts = self._at_end, part.parameter, len(bucket.parts)

        # Both run for every gradient of every step.
        def before(gradient: Tensor) -> None:
            at_end.settle()  # first clean up after a backward that raised
            if input_.grad is not None:
                self.set_aside(part)

        def after(parameter: Tensor) -> None:
            if self.is_last or self._every_micro_batch:
                missing = bucket.missing
                missing.discard(part)
                if not missing or len(missing) == n_parts - 1:
                    self._begun_or_ready()

        return before, after

    def _begun_or_ready(self) -> None:
        """Note a bucket whose first or last gradient is ready."""
        self._at_end.expect()
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._reduce()

    def _finish(self) -> None:
        """Reduce the remaining buckets when backward ends."""
        self._reduce_the_rest()
        self.on_end()

    def _give_up(self) -> None:
        """Clean up after a backward that raised: free unreduced gradients."""
        # Earlier sums are unchanged unless zeroed.
        self._wait_reduction()
        self._unsure.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.parts)
        for part in self.parts:
            part.parameter.grad, part.sum = part.shard.grad, None


class Hop(ShardedBuckets):
    """Shards further what earlier groups hold: from one factor to the next, once their sums are complete."""

    def reduce_complete(self, complete: set[Part]) -> None:
        """Reduce the next buckets whose parts are all among those with `complete` sums."""
        while self._next < len(self._buckets) and complete.issuperset(self._buckets[self._next].parts):
            self._take_sums(self._buckets[self._next])
            self._reduce()

    def reduce_sums(self) -> None:
        """Reduce all sums that are left, if this micro-batch reduces."""
        if not self.reduces:
            return
        for bucket in self._buckets[self._next :]:
            self._take_sums(bucket)
        self._reduce_the_rest()

    def give_up(self) -> None:
        """Clean up after a backward that raised."""
        self._wait_reduction()
        self._unsure.clear()
        self._next = 0

    def _take_sums(self, bucket: Bucket) -> None:
        for part in bucket.parts:
            self.set_aside(part)
            if part.shard.grad is not part.sum:  # zeroed in between
                part.sum = None
        bucket.missing = {part for part in bucket.parts if part.parameter.grad is None}
