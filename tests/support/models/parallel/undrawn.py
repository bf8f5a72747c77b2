"""The model of `separate.py` without dropout, whose draws would differ under micro-batch rotation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from separate import GPT, batch, loss
from torch import nn

__all__ = ["batch", "loss", "model"]
global_batch = 8


def model() -> nn.Module:
    made = GPT()
    for block in made.h:
        block.drop = nn.Identity()  # type: ignore[assignment]
    return made
