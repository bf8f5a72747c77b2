"""Gradients on SSD, from when they have landed on the host until the optimizer's step reads them (ZeRO-Infinity, section 5.1.1).

Each has its place there. Four rules, which the pass `passes.ssd_gradients` follows op by op:

Rule 1. A gradient that has arrived on the host is written. `WRITES` of them are being written at most: before another write
        begins the oldest is finished, and its host memory is free. When backward ends, all are.
Rule 2. In a further micro-batch the sum so far is read when the gradient's copy to the host starts, added to it on the host, and
        takes its place: sum and gradient have the bits of a sum on the host.
Rule 3. What `grad` of the held parameter is says whether there is a sum: the place on SSD, or None.
Rule 4. The step reads a gradient with its piece (`runtime.ssd_optimizer`), and lets go of it when the piece is updated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.read_ahead import WRITES
from memtune.runtime import transfer
from memtune.runtime.tiers import HOST, SSD, mark, tier
from memtune.runtime.tree import local


class SsdGradients:
    """The places, and what is on its way to them.

    Args:
        held: By parameter, what the optimizer holds in its place.
        names: Of the parameters, for errors.

    Raises:
        EnvironmentFault: There is no room on SSD; says for which parameter.
    """

    def __init__(self, held: Mapping[nn.Parameter, nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
        self._held = held
        self._places = {parameter: _place(parameter, names[parameter]) for parameter in held}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._writing: deque[tuple[Tensor, Tensor]] = deque()  # (on SSD, on the host)
        self.written_bytes = 0

    def starts_down(self, parameter: nn.Parameter) -> None:
        """Rule 2: its copy to the host has begun."""
        if (left := self._sums.pop(parameter, None)) is not None:  # of a backward that ended in an error
            transfer.abandon(left)
        if self._held[parameter].grad is not None:
            self._sums[parameter] = torch.ops.memtune.from_ssd(self._places[parameter])

    def arrived(self, parameter: nn.Parameter, host: Tensor) -> None:
        """Rules 1 and 2."""
        if (so_far := self._sums.pop(parameter, None)) is not None:
            transfer.finish(so_far)
            with tier(HOST):
                host.add_(so_far)
            del so_far
        if len(self._writing) == WRITES:
            self._finish_oldest()
        place = self._places[parameter]
        torch.ops.memtune.write_ssd_(place, host)
        self.written_bytes += host.nbytes
        self._writing.append((place, host))
        self._held[parameter].grad = place

    def flush(self) -> None:
        """Everything is written."""
        while self._writing:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        transfer.written(self._writing.popleft()[0])


def _place(parameter: nn.Parameter, name: str) -> Tensor:
    with tier(HOST):
        nothing = torch.zeros(local(parameter).shape, dtype=parameter.dtype)
    ssd: Tensor = torch.ops.memtune.to_ssd(nothing, f"the gradient of {name}")
    transfer.written(ssd)
    mark(ssd, SSD)
    return ssd
