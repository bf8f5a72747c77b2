"""A model that is cast with `.to(torch.bfloat16)` and reads a number with `.item()` while it is built."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 64
global_batch = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(32, DIM), nn.Sequential(*(Block() for _ in range(4))), nn.Linear(DIM, 10))
    largest = max(param.detach().abs().max().item() for param in net.parameters())
    with torch.no_grad():
        for param in net.parameters():
            param.div_(max(largest, 1.0))
    return net.to(torch.bfloat16)


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 16, 32, dtype=torch.bfloat16), torch.randint(10, (size, 16))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())
