"""A loss that reads a weight directly, not through its layer."""

import torch
from torch import Tensor, nn

global_batch = 4


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def batch(size: int) -> Tensor:
    return torch.randn(size, 8)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    weight: Tensor = model[2].weight  # type: ignore[index, assignment]
    return model(batch).square().mean() + weight.square().sum()
