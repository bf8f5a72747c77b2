"""The second hop of MiCS: sums of gradient shards averaged between the copies of the model, once a step.

Three rules:

1. FSDP2 reduces inside a group in every micro-batch and sums up shards. A unit's sums are views of one storage, the first
   micro-batch's: it is averaged as a whole, in place.
2. A unit is averaged when the next one is reduced, by FSDP2's hook for all-reduces and on its stream: by then its own shard has
   been added. The last one follows when backward ends.
3. Averages stay averages: sums that all copies already share are the same after another round. So a training loop that does not
   say which micro-batch is the last one gets right gradients, and pays for a round in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memtune.runtime.backward_end import BackwardEnd
from memtune.runtime.tree import local

Unit = tuple[nn.Parameter, ...]
"""Sharded parameters that are reduced together."""


class OncePerStep:
    """Averages gradient shards over the ranks that hold the same ones, in the last micro-batch of a step.

    Args:
        group: The ranks that hold the same shard, one of each copy.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._averages = True
        self._waiting: Unit = ()
        self._at_end = BackwardEnd(self._average, self._give_up)

    def hook(self, unit: Unit) -> Callable[[Tensor], None]:
        """What FSDP2 is to call when `unit` has been reduced; the shard that it hands over is not in the sums yet."""
        return lambda shard: self._reduced(unit)

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """The context of a micro-batch: only the last one averages."""
        self._averages = last
        try:
            yield
        finally:
            self._averages = True

    def at_end(self, units: Iterable[Unit]) -> Callable[[], None]:
        """Averages by itself no more; returns what averages the sums of all `units`."""
        self._averages, all_units = False, tuple(units)

        def average() -> None:
            for unit in all_units:
                self._waiting = unit
                self._average()

        return average

    def _reduced(self, unit: Unit) -> None:
        if not self._averages:
            return
        self._at_end.expect()  # FSDP2 has queued its own before any unit is reduced
        self._average()  # rule 2
        self._waiting = unit

    def _give_up(self) -> None:
        """A backward has raised: its last unit waits no more."""
        self._waiting = ()

    @torch.no_grad()
    def _average(self) -> None:
        unit, self._waiting = self._waiting, ()
        for sums in _storages(unit):
            torch.ops.memtune.all_reduce_(sums, self._group.group_name, self._group.size(), "avg")
            if sums.is_cuda:  # it is another stream's: freed early, that stream would fill it anew under this one's feet
                sums.record_stream(torch.cuda.current_stream())


def _storages(unit: Unit) -> list[Tensor]:
    """What holds the unit's sums, each storage once and flat (rule 1)."""
    found: dict[int, Tensor] = {}
    for parameter in unit:
        if parameter.grad is not None:
            shard = local(parameter.grad)
            storage = shard.untyped_storage()
            found.setdefault(storage._cdata, shard.as_strided((storage.nbytes() // shard.element_size(),), (1,), 0))
    return list(found.values())
