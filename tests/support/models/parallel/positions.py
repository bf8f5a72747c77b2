"""Blocks that can be sharded by positions, with code next to them that treats one position differently;
BETWEEN_LAYERS selects it.
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, WHAT = 16, os.environ.get("BETWEEN_LAYERS", "")
SEQ = 7 if WHAT == "odd" else 8
global_batch = 8


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm(x) if WHAT == "inside" else x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), MLP()
        self.batch_norm = nn.BatchNorm1d(DIM)
        self.table = nn.Buffer(torch.linspace(0, 1, SEQ).unsqueeze(-1))

    def forward(self, x: Tensor) -> Tensor:
        if WHAT == "first":
            x = x + x[:, :1]
        elif WHAT == "table":
            x = x + self.table[: x.shape[1]]
        elif WHAT == "mean":
            x = x + x.mean(1, keepdim=True)
        elif WHAT == "drawn":
            x = F.dropout(x, 0.1)
        elif WHAT == "batch_norm":
            x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h, self.scale = nn.ModuleList(Block() for _ in range(2)), nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
            if WHAT == "between":
                x = x * self.scale
            elif WHAT == "made":
                x = x * self.scale.tanh()
        return x


def model() -> nn.Module:
    return Net()


def batch(size: int) -> Tensor:
    return torch.randn(size, SEQ, DIM)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()
