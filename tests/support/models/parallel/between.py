"""MLPs whose code between the layers would compute something else on half of the features, in most cases."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def products(x: Tensor) -> Tensor:
    parts = x.unflatten(-1, (4, -1))
    return (parts @ parts.mT @ parts).flatten(-2)


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "dropout": lambda x: F.dropout(x, 0.5),
    "size": lambda x: x + x.shape[-1],
    "cumsum": lambda x: x.cumsum(0),
    "products": products,
}


class Mlp(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.down, self.name = nn.Linear(8, 16), nn.Linear(16, 8), name

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(BETWEEN[self.name](self.up(x)))


def model() -> nn.Module:
    return nn.Sequential(*(Mlp(name) for name in BETWEEN))


def blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.children())


def batch(size: int) -> Tensor:
    return torch.randn(size, 8)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()
