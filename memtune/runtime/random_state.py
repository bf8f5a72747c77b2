"""The random state a region starts with, so that its second run draws the same numbers. It lives on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from memtune.runtime.tiers import HOST, tier


@dataclass(frozen=True)
class RandomState:
    """State of the CPU generator, and of the CUDA generator of the module's device where it has one."""

    cpu: Tensor  # uint8, on the host tier
    cuda: Tensor | None
    device: torch.device | None

    @classmethod
    def capture(cls, module: nn.Module) -> RandomState:
        """The state now."""
        first = next(module.parameters(), None)
        device = first.device if first is not None and first.is_cuda else None
        with tier(HOST):
            return cls(torch.get_rng_state(), None if device is None else torch.cuda.get_rng_state(device), device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw from this state inside; outside, everything goes on as if nothing had been drawn."""
        now = self._now()
        self._set()
        try:
            yield
        finally:
            now._set()

    def continue_from(self) -> None:
        """Draw from this state from here on; for use inside `restored`."""
        self._set()

    def _now(self) -> RandomState:
        with tier(HOST):
            cuda = None if self.device is None else torch.cuda.get_rng_state(self.device)
            return RandomState(torch.get_rng_state(), cuda, self.device)

    def _set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and self.device is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
