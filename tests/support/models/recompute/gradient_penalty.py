"""A gradient penalty: a backward inside forward, whose graph is kept for the second backward."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.softplus(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 32), nn.Linear(32, 1)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def model() -> nn.Module:
    return Net()


def batch(size: int) -> Tensor:
    return torch.randn(size, 64, 20)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    x = batch.requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + ((gradient.norm(dim=-1) - 1) ** 2).mean()
