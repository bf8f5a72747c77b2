"""What a state dict verifies of an optimizer on SSD, against what whoever gets it reads then."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch.optim import Optimizer

from memtune.ssd import ssd_tensors


def verified_and_read(optimizer: Optimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each piece what was there when it was verified, and what is there when its state dict has
    been made.
    """
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    verified = ssd_tensors.verified

    def noted(ssd: torch.Tensor) -> None:
        verified(ssd)
        seen.append((ssd.clone(), ssd))

    with patch.object(ssd_tensors, "verified", noted):
        optimizer.state_dict()
    return seen
