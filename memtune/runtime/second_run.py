"""The second run of a region's forward under `runtime.activations`: what it saves is compared and handed out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memtune.errors import ApplyError
from memtune.runtime.look import Compared, Trail, difference, magnitude
from memtune.runtime.moved import id_of

if TYPE_CHECKING:
    from memtune.runtime.activations import _Frame as Frame


class Replay:
    """Collects what the second run saves; stops it when all is there."""

    def __init__(self, frame: Frame, inputs: set[int]) -> None:
        self._frame, self._inputs, self.count, self._trail = frame, inputs, 0, Trail(frame.fixed)
        self.enough = max(frame.wanted) + 1

    def pack(self, tensor: Tensor) -> int:
        """What the second run saves is kept if the first one's was; returns its number, -1 for what is saved as it is."""
        key = id_of(tensor)
        if key in self._frame.fixed:
            self._trail.passes(key)
            return -1
        if key in self._inputs or not is_plain(tensor) or self._frame.is_kept(tensor):
            return -1
        self._compare(tensor)
        self._frame.keep_back(self.count, tensor.detach())
        self.count += 1
        if self.count == self.enough:
            raise Enough
        return self.count - 1

    def _compare(self, tensor: Tensor) -> None:
        """The second run must save what the first one saved, as far as shape, type and the ops that led to it tell."""
        before, now = self._frame.looks[self.count], self._trail.look(tensor)
        if before != now:
            was, is_now = difference(before, now)
            raise ApplyError(
                f"{self._frame.region.name} did something else when it was run again: {is_now or 'nothing'} where the first "
                f"run had {was or 'nothing'}.",
                evidence=f"Saved tensor {self.count} was {before.dtype} {list(before.size)} and is {now.dtype} {list(now.size)}.",
                fix="its forward must do the same each time it runs; choose recompute: {kind: none} if it cannot",
                code="MT307",
            )
        if self.count in self._frame.magnitudes:
            region = self._frame.region
            compared = Compared(region.name, self.count, now, self._frame.magnitudes[self.count], magnitude(tensor))
            if len(self._frame.magnitudes) > 1 or tensor.device.type == "cpu":
                compared.check()
            else:
                region.compared = compared.sent()


class Enough(Exception):
    """The second run has saved the last tensor that is needed."""


def is_plain(value: Any) -> bool:
    """Whether it is a tensor with strides, and no DTensor."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not hasattr(value, "to_local")


def never(packed: int) -> Tensor:
    """What autograd asks of the second run's graph: nothing.

    Raises:
        ApplyError: It does.
    """
    raise ApplyError("backward ran through the graph of a recomputation.", fix="report this as a bug", code="MT308")
