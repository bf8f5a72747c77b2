"""Diffusion U-Net: GroupNorm, a time embedding, skip connections, one attention at the bottom, noise as the
target.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, WIDTH, TIME = 32, 32, 64
global_batch = 8


class Residual(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, n_in), nn.Conv2d(n_in, n_out, 3, padding=1)
        self.time, self.norm2 = nn.Linear(TIME, n_out), nn.GroupNorm(8, n_out)
        self.drop, self.conv2 = nn.Dropout(0.1), nn.Conv2d(n_out, n_out, 3, padding=1)
        self.skip = nn.Conv2d(n_in, n_out, 1) if n_in != n_out else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(self.drop(F.silu(self.norm2(y))))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        return x + self.out(y.unflatten(2, x.shape[2:]))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        one, two, four = WIDTH, 2 * WIDTH, 4 * WIDTH
        self.embed = nn.Sequential(nn.Linear(TIME, TIME), nn.SiLU(), nn.Linear(TIME, TIME))
        self.stem = nn.Conv2d(3, one, 3, padding=1)
        self.down = nn.ModuleList((Residual(one, one), Residual(one, two), Residual(two, four)))
        self.shrink = nn.ModuleList((nn.Conv2d(one, one, 3, 2, 1), nn.Conv2d(two, two, 3, 2, 1)))
        self.attention = Attention(four)
        self.up = nn.ModuleList((Residual(four + two, two), Residual(two + one, one)))
        self.grow = nn.ModuleList(
            (nn.ConvTranspose2d(four, four, 4, 2, 1), nn.ConvTranspose2d(two, two, 4, 2, 1))
        )
        self.out = nn.Conv2d(one, 3, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(TIME // 2, device=x.device) * (-math.log(10_000) / (TIME // 2)))
        angles = steps[:, None].float() * rates
        time = self.embed(torch.cat((angles.sin(), angles.cos()), dim=1))
        high = self.down[0](self.stem(x), time)
        middle = self.down[1](self.shrink[0](high), time)
        x = self.attention(self.down[2](self.shrink[1](middle), time))
        x = self.up[0](torch.cat((self.grow[0](x), middle), dim=1), time)
        return self.out(self.up[1](torch.cat((self.grow[1](x), high), dim=1), time))


def model() -> nn.Module:
    return UNet()


def batch(size: int) -> dict[str, Tensor]:
    return {"image": torch.randn(size, 3, IMAGE, IMAGE), "step": torch.randint(1000, (size,))}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    noise = torch.randn_like(batch["image"])
    share = (batch["step"] / 1000).view(-1, 1, 1, 1)
    noisy = batch["image"] * (1 - share).sqrt() + noise * share.sqrt()
    return F.mse_loss(model(noisy, batch["step"]), noise)
