"""Residual convolution blocks of small ops with group norms, as in diffusion U-Nets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, SIDE, BLOCKS, CLASSES = 8, 8, 8, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.GroupNorm(2, CHANNELS), nn.GroupNorm(2, CHANNELS)
        self.conv_1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.conv_2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv_1(F.silu(self.norm_1(x)))
        return x + self.conv_2(F.silu(self.norm_2(h)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.GroupNorm(2, CHANNELS), nn.Linear(CHANNELS, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(F.silu(self.norm(x)).mean((2, 3)))


def model() -> nn.Module:
    return ConvNet()


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, SIDE, SIDE), torch.randint(CLASSES, (size,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
