"""ConvNeXt-like under bf16 autocast: depthwise convolutions, channels-last norms, layer scale; AdamW without
foreach.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, WIDTHS, DEPTH, CLASSES = 64, (32, 64, 128), 2, 10
global_batch = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


class Shrink(nn.Module):
    def __init__(self, n_in: int, n_out: int, by: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(n_in, n_out, by, by), nn.GroupNorm(1, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        before = (3, *WIDTHS[:-1])
        self.shrink = nn.ModuleList(
            Shrink(a, b, 4 if a == 3 else 2) for a, b in zip(before, WIDTHS, strict=True)
        )
        self.stages = nn.ModuleList(nn.Sequential(*(Block(width) for _ in range(DEPTH))) for width in WIDTHS)
        self.norm, self.head = nn.LayerNorm(WIDTHS[-1]), nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        for shrink, stage in zip(self.shrink, self.stages, strict=True):
            images = stage(shrink(images))
        return self.head(self.norm(images.mean((2, 3))))


def model() -> nn.Module:
    return ConvNeXt()


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, IMAGE, IMAGE), torch.randint(CLASSES, (size,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        scores = model(batch[0])
    return F.cross_entropy(scores.float(), batch[1])


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, foreach=False)
