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
    """The slot that the next step writes, where the last step is kept."""

    def parts(self, of: Tensor) -> list[Tensor]:
        """Weight and moments in `of`, which is laid out as the piece."""
        if self.held.numel() == 0:  # a shard that is not there
            return [of.view(self.held.shape)] * (1 + len(self.moments))
        return [part.view(self.held.shape) for part in of.split(self.held.numel())]

    @property
    def target(self) -> Tensor:
        """What a step writes."""
        return self.ssd if self.spare is None else self.spare

    def swap(self, state: dict[str, Any]) -> None:
        """What has been written is the piece now; `state` and what the optimizer holds follow."""
        assert self.spare is not None
        self.ssd, self.spare = self.spare, self.ssd
        weight, *moments = self.parts(self.ssd)
        self.held.data = weight
        state.update(zip(self.moments, moments, strict=True))
