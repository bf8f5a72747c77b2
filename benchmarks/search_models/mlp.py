"""A small MLP of 13,000 parameters, for the cost of a search itself.

Shapes: B samples, D = 64 features.
"""

import torch
from torch import Tensor, nn

global_batch = 32
_D = 64


def model() -> nn.Module:
    """Return three hidden layers."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(_D, _D), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(_D, 8))


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return random points and the sums of eight of their parts."""
    x = torch.randn(size, _D)  # (B, D)
    return x, x.unflatten(-1, (8, -1)).sum(-1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error."""
    x, y = batch
    return nn.functional.mse_loss(model(x), y)
