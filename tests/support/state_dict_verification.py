"""Compare the pieces that a state dict of an optimizer on SSD verifies with those that its reader gets."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch.optim import Optimizer

from memtune.ssd import ssd_tensors


def verified_and_read(optimizer: Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each piece at the time of its verification, and at the time when the state dict is complete."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    verified = ssd_tensors.verified

    def noted(ssd: torch.Tensor) -> None:
        verified(ssd)
        seen.append((ssd.clone(), ssd))

    with patch.object(ssd_tensors, "verified", noted):
        optimizer.state_dict()
    return seen
