"""A stack of 3 × 3 convolutions, pooled and classified by a softmax; float32, Adam (GPUMemNet). ARCH is
"uniform", or gives widths that grow by powers up to 2,048: "pyramid", "bottleneck", "gradual".
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case_sizes import real, whole, word
from torch import Tensor, nn

global_batch = whole("B", 8)
_ACTIVATIONS = {
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "mish": nn.Mish,
    "prelu": nn.PReLU,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
}
_MOST = 2048


def _widths() -> Iterator[int]:
    first, depth, kind = whole("W", 32), whole("DEPTH", 2), word("ARCH", "uniform")
    shares = {
        "uniform": [0.0] * depth,
        "pyramid": [place / depth for place in range(depth)],
        "gradual": [place / (2 * depth) for place in range(depth)],
        "bottleneck": [0.0, *(place / (depth - 1) for place in range(depth - 1))],
    }[kind]
    for place, share in enumerate(shares):
        doubled = 2 if kind == "bottleneck" and place == 0 else 1
        yield min(int(doubled * first * (_MOST / first) ** share), _MOST)


def _layers() -> Iterator[nn.Module]:
    channels, drop = whole("IN", 3), real("P", 0.0)
    for width in _widths():
        yield nn.Conv2d(channels, width, kernel_size=3, padding=1)
        if whole("BN", 1):
            yield nn.BatchNorm2d(width)
        yield _ACTIVATIONS[word("ACT", "gelu")]()
        if drop:
            yield nn.Dropout(drop)
        channels = width
    yield from (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, whole("CLS", 10)), nn.Softmax(-1))


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
