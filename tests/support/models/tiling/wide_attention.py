"""Blocks whose attention, or convolutions, save more than anything else: samples are computed alone, tokens
and pixels are not.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, SEQ, CHANNELS, PIXELS = 16, 24, 8, 12


class Attention(nn.Module):
    """Attention with its scores as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, values: Tensor, *, scale: float) -> tuple[Tensor, None]:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, DIM // 4).permute(2, 0, 3, 1, 4).unbind()
        scores = torch.softmax(q @ k.mT * scale, -1)
        return self.out((scores @ v).transpose(1, 2).flatten(2)), None


class SelfAttention(nn.Module):
    """Calls attention as nn.MultiheadAttention is called, with one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, scale=(DIM / 4) ** -0.5)[0]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(CHANNELS, 4 * CHANNELS, 3, padding=1)
        self.norm = nn.GroupNorm(4, 4 * CHANNELS)
        self.narrow = nn.Conv2d(4 * CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.relu(self.norm(self.wide(x))))


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Blocks:
    global_batch = 4

    def __init__(self, inner: type[nn.Module], *shape: int) -> None:
        self._inner, self._shape = inner, shape

    def model(self) -> nn.Module:
        return nn.Sequential(*(Block(self._inner()) for _ in range(4)))

    def batch(self, size: int) -> Tensor:
        return torch.randn(size, *self._shape)

    @staticmethod
    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        # The gradient of the keys' bias is zero but for rounding, of which Adam would make an update.
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)

    @staticmethod
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()


attention = Blocks(SelfAttention, SEQ, DIM)
convolutions = Blocks(Convolutions, CHANNELS, PIXELS, PIXELS)
