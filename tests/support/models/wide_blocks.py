"""Eight equal blocks of 1 MiB each, so that small buckets hold the gradients of one or two."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

WIDTH, LAYERS = 256, 8
global_batch = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Linear(16, WIDTH), nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def model() -> nn.Module:
    return Blocks()


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 16), torch.randn(size, 16)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)
