"""In-place operators, views that share one storage, and buffers that the forward pass changes."""

import torch
from torch import Tensor, nn

DIM = 64
global_batch = 8


class Block(nn.Module):
    running_peak: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(2 * DIM, DIM)
        self.register_buffer("running_peak", torch.zeros(DIM))
        self.register_buffer("scale", torch.full((1,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value, rest = self.fused(x).split(DIM, dim=-1)  # three views of one storage
        with torch.no_grad():
            self.running_peak.mul_(0.9).add_(value.detach().abs().amax(dim=(0, 1)), alpha=0.1)
        mixed = torch.cat([gate.sigmoid() * value, rest.transpose(0, 1).contiguous().transpose(0, 1)], dim=-1)
        y = self.out(mixed)
        y[:, 0].mul_(self.scale)  # in place, through a view
        y += x
        return y.relu_()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> nn.Module:
    return Net()


def batch(size: int) -> Tensor:
    return torch.randn(size, 12, 16)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()
