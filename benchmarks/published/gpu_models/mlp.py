"""A pyramid of linear layers, each half as wide as the one before; float32, Adam (GPUMemNet)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case_sizes import real, whole, word
from torch import Tensor, nn

global_batch = whole("B", 8)
_ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "softplus": nn.Softplus}


def _layers() -> Iterator[nn.Module]:
    width, classes, drop = whole("I", 64), whole("O", 10), real("P", 0.0)
    for _ in range(whole("DEPTH", 2)):
        narrower = max(width // 2, classes)
        yield nn.Linear(width, narrower)
        if whole("BN", 0):
            yield nn.BatchNorm1d(narrower)
        yield _ACTIVATIONS[word("ACT", "relu")]()
        if drop:
            yield nn.Dropout(drop)
        width = narrower
    yield from (nn.Linear(width, classes), nn.Softmax(-1))


def model() -> nn.Module:
    """Return the network."""
    return nn.Sequential(*_layers())


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return features and labels."""
    return torch.randn(size, whole("I", 64)), torch.randint(whole("O", 10), (size,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return Adam."""
    return torch.optim.Adam(params)
