"""A workload of 12 MiB, nearly all of it in blocks, with the update that offload reproduces bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Net(nn.Module):
    def __init__(self, width: int = 256, blocks: int = 24) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def model() -> nn.Module:
    return Net()


def batch(size: int) -> Tensor:
    return torch.randn(size, 8)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).pow(2).mean()
    return found


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, fused=True)
