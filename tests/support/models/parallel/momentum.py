"""The model of `undrawn.py` with an optimizer that does not divide by the gradient's size, so that weights
are as close as gradients.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import nn
from undrawn import batch, global_batch, loss, model

__all__ = ["batch", "global_batch", "loss", "model", "optimizer"]


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
