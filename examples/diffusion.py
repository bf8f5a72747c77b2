"""Diffusion: a small U-Net that predicts noise, with skip connections that hold activations for long.

    memtune plan examples/diffusion.py --gpus 1 --gpu-type a100-40g
    memtune search examples/diffusion.py --device cpu --trials 4

The skip connections keep early activations until the end of forward, so recomputing whole blocks
does not free them. Offload of activations and plans by tensor can.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, IMAGE = 16, 16
global_batch = 8


class Block(nn.Module):
    """A residual block that knows the time."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.conv_1, self.conv_2 = nn.Conv2d(n_in, n_out, 3, padding=1), nn.Conv2d(n_out, n_out, 3, padding=1)
        self.norm, self.time = nn.GroupNorm(4, n_out), nn.Linear(1, n_out)
        self.skip = nn.Conv2d(n_in, n_out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the block's output."""
        y = F.silu(self.conv_1(x) + self.time(time)[:, :, None, None])
        return self.conv_2(self.norm(y)) + self.skip(x)


class UNet(nn.Module):
    """Two levels down, two up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(3, CHANNELS), Block(CHANNELS, 2 * CHANNELS)])
        self.middle = Block(2 * CHANNELS, 2 * CHANNELS)
        self.up = nn.ModuleList([Block(4 * CHANNELS, CHANNELS), Block(2 * CHANNELS, CHANNELS)])
        self.out = nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return the predicted noise."""
        kept = []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2)
            x = block(torch.cat([x, kept.pop()], 1), time)
        return self.out(x)


def model() -> nn.Module:
    """Return the U-Net."""
    return UNet()


def batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy images of one colour, their time and the noise."""
    colour, time = torch.rand(size, 3, 1, 1), torch.rand(size, 1)
    noise = torch.randn(size, 3, IMAGE, IMAGE)
    share = time[:, :, None, None]
    return (1 - share) * colour + share * noise, time, noise


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the mean squared error of the noise."""
    images, time, noise = batch
    return F.mse_loss(model(images, time), noise)


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(params, lr=2e-3)
