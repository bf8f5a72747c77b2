"""One parameter's weight and moments on SSD, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(eq=False)
class Piece:
    """Where a parameter's weight and moments are."""

    name: str
    device: nn.Parameter
    held: nn.Parameter  # what the optimizer holds in its place, on SSD
    ssd: Tensor
    group: dict[str, Any]
    moments: list[str]
    spare: Tensor | None = None
    """The other slot, where the last step is kept."""
    fresh: bool = False
    """Written since that step was complete: so the last one is in the other slot, and stays there."""

    def parts(self, of: Tensor) -> list[Tensor]:
        """Weight and moments in `of`, which is laid out as the piece."""
        if self.held.numel() == 0:  # a shard that is not there
            return [of.view(self.held.shape)] * (1 + len(self.moments))
        return [part.view(self.held.shape) for part in of.split(self.held.numel())]

    @property
    def target(self) -> Tensor:
        """What a step writes: never where the last complete one is."""
        return self.ssd if self.spare is None or self.fresh else self.spare

    def turn(self, state: dict[str, Any]) -> None:
        """What is written in `target` is the piece from now on; `state` and what the optimizer holds follow.

        State that was loaded, and that nobody has put into the piece yet, stays what it is.
        """
        if self.spare is None or self.fresh:
            return
        was = self.ssd.untyped_storage()._cdata
        self.ssd, self.spare, self.fresh = self.spare, self.ssd, True
        weight, *moments = self.parts(self.ssd)
        self.held.data = weight
        for name, moment in zip(self.moments, moments, strict=True):
            if (value := state.get(name)) is not None and value.untyped_storage()._cdata == was:
                state[name] = moment
