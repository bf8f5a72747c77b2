"""A stack of equal 3 × 3 convolutions, pooled and classified by a softmax; float32, Adam (GPUMemNet's
"uniform").
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case_sizes import real, whole, word
from torch import Tensor, nn

global_batch = whole("B", 8)
_ACTIVATIONS = {"gelu": nn.GELU, "mish": nn.Mish, "prelu": nn.PReLU, "relu": nn.ReLU}


def _layers() -> Iterator[nn.Module]:
    channels, width, drop = whole("IN", 3), whole("W", 32), real("P", 0.0)
    for _ in range(whole("DEPTH", 2)):
        yield nn.Conv2d(channels, width, kernel_size=3, padding=1)
        if whole("BN", 1):
            yield nn.BatchNorm2d(width)
        yield _ACTIVATIONS[word("ACT", "gelu")]()
        if drop:
            yield nn.Dropout(drop)
        channels = width
    yield from (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, whole("CLS", 10)), nn.Softmax(-1))


def model() -> nn.Module:
    """Return the network."""
    return nn.Sequential(*_layers())


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return images and labels."""
    side = whole("IMG", 32)
    return torch.randn(size, whole("IN", 3), side, side), torch.randint(whole("CLS", 10), (size,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return Adam."""
    return torch.optim.Adam(params)
