"""Contrastive training with a moving average of the encoder and a memory bank, both updated in the model's
forward (MoCo).
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, OUT, BANK = 64, 32, 128
global_batch = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.head(x), dim=-1)


class MoCo(nn.Module):
    bank: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.average = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("bank", F.normalize(torch.randn(BANK, OUT), dim=-1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def keys(self, x: Tensor) -> Tensor:
        """Update the average and return its output."""
        for mine, other in zip(self.average.parameters(), self.encoder.parameters(), strict=True):
            mine.mul_(0.99).add_(other, alpha=0.01)
        return self.average(x)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        rows = (self.place + torch.arange(len(keys), device=keys.device)) % BANK
        self.bank[rows] = keys
        self.place[0] = (self.place[0] + len(keys)) % BANK

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        q, k = self.encoder(query), self.keys(key)
        same = (q * k).sum(-1, keepdim=True)
        others = q @ self.bank.clone().detach().T
        self.enqueue(k)
        return torch.cat([same, others], dim=1) / 0.07


def model() -> nn.Module:
    return MoCo()


def batch(size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size * 16, WIDTH)
    return x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = model(*batch)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))
