"""Blocks with gates whose inputs autograd saves: a gate's output can be recomputed part by part, bitwise."""

import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(width, hidden),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.leaky_relu(self.gate(x), 0.1) * self.up(x))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Gated(32, 128) for _ in range(3)), nn.Linear(32, 8))


def batch(size: int) -> torch.Tensor:
    return torch.randn(size, 64, 32, generator=torch.Generator().manual_seed(1))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()
