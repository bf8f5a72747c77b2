"""Contrastive learning: the loss compares all samples of a batch, so the batch must not be divided.

    memtune plan examples/contrastive.py --gpus 1 --gpu-type a100-40g
    memtune search examples/contrastive.py --device cpu --trials 4

The mean of the parts' losses is not the loss of the batch. memtune checks that once and then leaves the
micro-batch alone; recomputation and offload save memory.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, DIM, DEPTH = 24, 32, 3
global_batch = 16


class Tower(nn.Module):
    """A stack of residual layers that ends in a unit vector."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, DIM)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            for _ in range(DEPTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return one unit vector per sample."""
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return F.normalize(x, dim=-1)


class Pair(nn.Module):
    """Two towers, one for each view."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the similarity of every left sample with every right one."""
        return self.left(left) @ self.right(right).T * 10


def model() -> nn.Module:
    """Return the pair."""
    return Pair()


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return two noisy views of the same points."""
    points = torch.randn(size, FEATURES)
    return points + 0.1 * torch.randn_like(points), points.roll(1, 1) + 0.1 * torch.randn_like(points)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of finding the other view, in both directions."""
    similar = model(*batch)
    labels = torch.arange(len(similar), device=similar.device)
    return (F.cross_entropy(similar, labels) + F.cross_entropy(similar.T, labels)) / 2


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(params, lr=1e-3)
