"""What a state dict verifies of an optimizer on SSD, against what whoever gets it reads then."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch.optim import Optimizer

from memtune.runtime import disk


def verified_and_read(optimizer: Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each piece what was there when it was verified, and what is there when its state dict has been made."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    verified = disk.verified

    def noted(ssd: torch.Tensor) -> None:
        verified(ssd)
        seen.append((ssd.clone(), ssd))

    with patch.object(disk, "verified", noted):
        optimizer.state_dict()
    return seen
