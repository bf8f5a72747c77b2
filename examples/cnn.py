"""BatchNorm: a ResNet whose samples depend on each other, so memtune must not change the micro-batch.

    memtune plan examples/cnn.py --gpus 1 --gpu-type a100-40g
    memtune search examples/cnn.py --device cpu --trials 4

The images are coloured stripes, generated, and classified by their direction. BatchNorm mixes the samples of
a micro-batch, so memtune does not change the micro-batch, and reports that. Environment variables:
MEMTUNE_CNN_WIDTH (channels of the first stage), MEMTUNE_CNN_DEPTH (residual blocks per stage),
MEMTUNE_CNN_IMAGE (pixels), MEMTUNE_CNN_BATCH (samples per optimizer step over all ranks).

Shapes: B samples, C channels, S pixels.
"""

import math
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _setting(name: str, default: int) -> int:
    return int(os.environ.get(f"MEMTUNE_CNN_{name}", default))


WIDTH, DEPTH, IMAGE, CLASSES = _setting("WIDTH", 32), _setting("DEPTH", 2), _setting("IMAGE", 32), 8
global_batch = _setting("BATCH", 32)


class Residual(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution if the shape changes."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or n_in != n_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)
            )

    def forward(self, x: Tensor) -> Tensor:  # (B, C, S, S)
        """Return the block's output."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, three stages that halve the image and double the channels, and a linear head on the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()
        )
        stages, n_in = [], WIDTH
        for stage in range(3):
            n_out = WIDTH * 2**stage
            blocks = [
                Residual(n_in if i == 0 else n_out, n_out, 2 if i == 0 and stage else 1) for i in range(DEPTH)
            ]
            stages.append(nn.Sequential(*blocks))
            n_in = n_out
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(n_in, CLASSES)

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, S, S) → (B, CLASSES)
        """Return logits of the direction."""
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


def model() -> nn.Module:
    """Return the ResNet, with weights drawn from torch's generator."""
    return ResNet()


def batch(size: int) -> dict[str, Tensor]:
    """Return `size` images of noisy stripes in random colours, and the index of their direction."""
    labels = torch.randint(CLASSES, (size,))
    angle = (labels * math.pi / CLASSES).view(size, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(IMAGE), torch.arange(IMAGE), indexing="ij")
    phase = torch.rand(size, 1, 1) * 2 * math.pi
    stripes = torch.sin((rows * angle.sin() + columns * angle.cos()) * 0.8 + phase)  # (B, S, S)
    images = stripes[:, None] * torch.rand(size, 3, 1, 1) + 0.3 * torch.randn(size, 3, IMAGE, IMAGE)
    return {"images": images, "labels": labels}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy per image."""
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4)
