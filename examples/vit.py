"""Images: a vision transformer, whose activations outweigh its weights; gradients add up over any
micro-batch.

    memtune plan examples/vit.py --gpus 1 --gpu-type a100-40g
    memtune search examples/vit.py --device cpu --max-memory 9MiB --trials 4

The images are noisy stripes and the label is their direction, so there is nothing to download.
Layer norm does not mix samples, so memtune may divide the batch; compare cnn.py, where batch norm
forbids it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, PATCH, DIM, DEPTH, CLASSES = 32, 8, 96, 4, 8
global_batch = 16


class ViT(nn.Module):
    """Patches, learned positions, transformer layers, and a linear head on the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.positions = nn.Parameter(torch.randn((IMAGE // PATCH) ** 2, DIM) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True) for _ in range(DEPTH)
        )
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of the direction."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def model() -> nn.Module:
    """Return the transformer."""
    return ViT()


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return `size` images and the index of their direction."""
    labels = torch.randint(CLASSES, (size,))
    angle = (labels * math.pi / CLASSES).view(size, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(IMAGE), torch.arange(IMAGE), indexing="ij")
    stripes = torch.sin((rows * angle.sin() + columns * angle.cos()) * 0.8)
    return stripes[:, None] + 0.2 * torch.randn(size, 3, IMAGE, IMAGE), labels


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(params, lr=1e-3)
