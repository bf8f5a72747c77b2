"""Mixture of experts: most weights belong to experts that few tokens use, so they can be offloaded.

    memtune plan examples/experts.py --gpu-type a100-40g --freeze offload.states=moesys --offload-dir .
    memtune search examples/experts.py --device cpu --trials 4

memtune finds experts automatically: equal modules in a list whose name has `experts`, in a repeated
block. MEMTUNE_EXPERTS_DIM changes the width.
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, EXPERTS, DEPTH, CLASSES = 16, 4, 3, 4
DIM = int(os.environ.get("MEMTUNE_EXPERTS_DIM", "32"))
global_batch = 16


class Block(nn.Module):
    """A router and experts; every sample goes to the expert with the largest weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the chosen experts' output."""
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), EXPERTS) * weights
        return x + sum(chosen[:, i : i + 1] * expert(y) for i, expert in enumerate(self.experts))


class Mixture(nn.Module):
    """A stack of blocks between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, DIM), nn.Linear(DIM, CLASSES)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model() -> nn.Module:
    """Return the mixture."""
    return Mixture()


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return points around four centres, and the index of the centre."""
    labels = torch.randint(CLASSES, (size,))
    centres = torch.eye(FEATURES)[:CLASSES] * 2
    return centres[labels] + 0.5 * torch.randn(size, FEATURES), labels


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    points, labels = batch
    return F.cross_entropy(model(points), labels)


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(params, lr=3e-3)
