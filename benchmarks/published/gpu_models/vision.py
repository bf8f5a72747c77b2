"""Image classifiers with random weights, as in the papers: NAME is vgg16, vgg19, resnet18 to resnet152,
wide_resnet50_2, resnext101_32x4d, mobilenet_v2, convnext_tiny, convnext_small, convnext_base or
convnextv2_huge, whose MLPs are recomputed with CHECKPOINT; CLS the classes. OPT is the optimizer, with
MOMENTUM, as a loop over parameters with LOOP. AMP is the type of autocast, TRUE that of all weights
instead, LAST puts channels last, KEEPS_GRADS is zero_grad of torch before 2.0, DROP the share of samples
whose deepest block ConvNeXt skips. With READY the images are on the device before the step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case_sizes import real, whole, word
from images import CLASSES, DTYPE, FORMAT, batch, loss, optimizer_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

NAME = word("NAME", "resnet50")
global_batch = whole("B", 8)
zero_grad_to_none = not whole("KEEPS_GRADS", 0)
__all__ = ["batch", "loss", "model", "optimizer"]


def _normed(inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution and its batch norm."""
    made = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return [made, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut (He et al. 2016), the middle one `inner` wide and in groups."""

    times = 4
    """Width of the output over `width`."""

    def __init__(self, inputs: int, width: int, stride: int, inner: int, groups: int) -> None:
        super().__init__()
        act = nn.ReLU(inplace=True)
        self.body = nn.Sequential(
            *_normed(inputs, inner),
            act,
            *_normed(inner, inner, 3, stride, groups),
            act,
            *_normed(inner, 4 * width),
        )
        changes = stride > 1 or inputs != 4 * width
        self.shortcut = nn.Sequential(*(_normed(inputs, 4 * width, 1, stride) if changes else ()))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        found = self.body(x)
        found += self.shortcut(x)
        activated: Tensor = self.act(found)
        return activated


class Basic(Bottleneck):
    """Two convolutions around a shortcut, in smaller ResNets."""

    times = 1

    def __init__(self, inputs: int, width: int, stride: int, inner: int, groups: int) -> None:
        super().__init__(inputs, width, stride, inner, groups)
        self.body = nn.Sequential(
            *_normed(inputs, width, 3, stride), nn.ReLU(inplace=True), *_normed(width, width, 3)
        )
        changes = stride > 1 or inputs != width
        self.shortcut = nn.Sequential(*(_normed(inputs, width, 1, stride) if changes else ()))


class Inverted(nn.Module):
    """A depthwise convolution between two of 1 × 1 (MobileNetV2, Sandler et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int, times: int) -> None:
        super().__init__()
        wide, act = inputs * times, nn.ReLU6(inplace=True)
        first = [*_normed(inputs, wide), act] if times > 1 else []
        self.body = nn.Sequential(*first, *_normed(wide, wide, 3, stride, wide), act, *_normed(wide, outputs))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        found: Tensor = self.body(x)
        return x + found if self.adds else found


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized image."""
        last = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return last.permute(0, 3, 1, 2)


class NextBlock(nn.Module):
    """A depthwise 7 × 7 convolution and an MLP over channels, scaled (ConvNeXt, Liu et al. 2022)."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale, self.drop = nn.Parameter(torch.full((width, 1, 1), 1e-6)), drop

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block; a sample's update is dropped with the block's probability."""
        mixed = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        found: Tensor = self.scale * mixed
        if self.drop:
            kept = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(1 - self.drop)
            found = found * kept.div_(1 - self.drop)
        return x + found


class ResponseMlp(nn.Sequential):
    """An MLP that weighs inner activations by the norm of their channel (ConvNeXt V2, Woo et al. 2023)."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.weight, self.bias = (nn.Parameter(torch.zeros(4 * width)) for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        """Return the output of the MLP."""
        up, activation, down = self
        x = activation(up(x))
        norms = x.norm(p=2, dim=(1, 2), keepdim=True)
        shares = norms / (norms.mean(dim=-1, keepdim=True) + 1e-6)
        found: Tensor = down(x + torch.addcmul(self.bias, self.weight, x * shares))
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the MLP, recomputed if the case asks for it."""
        if not whole("CHECKPOINT", 0):
            return self.body(x)
        kept: Tensor = checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=False)
        return kept


class NextBlock2(nn.Module):
    """A depthwise 7 × 7 convolution and an MLP with a norm of responses (ConvNeXt V2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.mlp = nn.LayerNorm(width, eps=1e-6), ResponseMlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        found: Tensor = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + found.permute(0, 3, 1, 2)


def _vgg(convolutions: tuple[int, ...]) -> Iterator[nn.Module]:
    inputs = 3
    for count, width in zip(convolutions, (64, 128, 256, 512, 512), strict=True):
        for _ in range(count):
            yield from (nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True))
            inputs = width
        yield nn.MaxPool2d(2, 2)
    yield from (nn.AdaptiveAvgPool2d(7), nn.Flatten())
    for size in (512 * 49, 4096):
        yield from (nn.Linear(size, 4096), nn.ReLU(inplace=True), nn.Dropout())
    yield nn.Linear(4096, CLASSES)


def _resnet(
    depths: tuple[int, ...], block: type[Bottleneck] = Bottleneck, group_width: int = 64, groups: int = 1
) -> Iterator[nn.Module]:
    yield from (*_normed(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    inputs = 64
    for stage, depth in enumerate(depths):
        for place in range(depth):
            width = 64 << stage
            inner = width * group_width // 64 * groups
            yield block(inputs, width, 2 if stage and not place else 1, inner, groups)
            inputs = block.times * width
    yield from (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def _mobilenet() -> Iterator[nn.Module]:
    yield from (*_normed(3, 32, 3, 2), nn.ReLU6(inplace=True))
    inputs, stages = 32, ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2))
    for times, outputs, depth, stride in (*stages, (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)):
        for place in range(depth):
            yield Inverted(inputs, outputs, 1 if place else stride, times)
            inputs = outputs
    yield from (*_normed(inputs, 1280), nn.ReLU6(inplace=True))
    yield from (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, CLASSES))


def _convnext(depths: tuple[int, ...], width: int, drop: float | None) -> Iterator[nn.Module]:
    yield from (nn.Conv2d(3, width, 4, 4), ChannelNorm(width, eps=1e-6))
    place = 0
    for stage, depth in enumerate(depths):
        for _ in range(depth):
            size = width << stage
            yield NextBlock2(size) if drop is None else NextBlock(size, drop * place / (sum(depths) - 1))
            place += 1
        if stage < 3:
            size = width << stage
            yield from (ChannelNorm(size, eps=1e-6), nn.Conv2d(size, 2 * size, 2, 2))
    yield nn.AdaptiveAvgPool2d(1)
    yield from (ChannelNorm(8 * width, eps=1e-6), nn.Flatten(), nn.Linear(8 * width, CLASSES))


def _layers() -> Iterator[nn.Module]:
    match NAME:
        case "vgg16" | "vgg19":
            yield from _vgg((2, 2, 3, 3, 3) if NAME == "vgg16" else (2, 2, 4, 4, 4))
        case "resnet50" | "resnet101" | "resnet152":
            deep = {"resnet50": (4, 6), "resnet101": (4, 23), "resnet152": (8, 36)}[NAME]
            yield from _resnet((3, *deep, 3))
        case "resnet18":
            yield from _resnet((2, 2, 2, 2), Basic)
        case "resnet34":
            yield from _resnet((3, 4, 6, 3), Basic)
        case "wide_resnet50_2":
            yield from _resnet((3, 4, 6, 3), group_width=128)
        case "resnext101_32x4d":
            yield from _resnet((3, 4, 23, 3), group_width=4, groups=32)
        case "mobilenet_v2":
            yield from _mobilenet()
        case "convnext_tiny":
            yield from _convnext((3, 3, 9, 3), 96, real("DROP", 0.1))
        case "convnext_small":
            yield from _convnext((3, 3, 27, 3), 96, real("DROP", 0.4))
        case "convnext_base":
            yield from _convnext((3, 3, 27, 3), 128, real("DROP", 0.5))
        case "convnextv2_huge":
            yield from _convnext((3, 3, 27, 3), 352, None)
        case other:
            raise ValueError(other)


def model() -> nn.Module:
    """Return the classifier."""
    return nn.Sequential(*_layers()).to(DTYPE, memory_format=FORMAT)  # type: ignore[call-overload,no-any-return]


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of the case."""
    return optimizer_of(params, "Adam", lr=1e-3)
