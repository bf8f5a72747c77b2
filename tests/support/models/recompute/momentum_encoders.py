"""Encoders trained against a copy of themselves that follows by averages: MoCo, a memory bank, BYOL."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, TOKENS, OUT = 32, 24, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(OUT, WIDTH), nn.Linear(WIDTH, OUT)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.last(x.mean(1)), dim=-1)


class Pair(nn.Module):
    """A trained encoder and its frozen copy, which each forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.average = copy.deepcopy(self.encoder).requires_grad_(False)

    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        for mine, other in zip(self.average.parameters(), self.encoder.parameters(), strict=True):
            mine.mul_(0.99).add_(other, alpha=0.01)
        out: Tensor = self.average(x)
        return out


class Queue(Pair):
    """The queue is another tensor after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(OUT, 64), dim=0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        target, out = self.target(y), self.encoder(x)
        scores = torch.cat([(out * target).sum(-1, keepdim=True), out @ self.queue.clone()], 1)
        self.queue = torch.cat([target.T, self.queue[:, : -len(target)]], 1)
        return scores / 0.1


class Bank(Pair):
    """Rows of the bank are written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", F.normalize(torch.randn(64, OUT), dim=1))

    def forward(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        target, out = self.target(y), self.encoder(x)
        scores = out @ self.bank.t().clone() - (out - target).pow(2).sum(-1, keepdim=True)
        with torch.no_grad():
            self.bank[index] = F.normalize(self.bank[index] + target, dim=1)
        return scores / 0.1


class TwoViews(Pair):
    """Both encoders run twice; averages are taken by a fused op."""

    @torch.no_grad()
    def target(self, x: Tensor) -> Tensor:
        torch._foreach_lerp_(list(self.average.parameters()), list(self.encoder.parameters()), 0.01)
        out: Tensor = self.average(x)
        return out

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = self.target(x), self.target(y)
        return (
            F.cosine_similarity(self.encoder(x), second) + F.cosine_similarity(self.encoder(y), first)
        ) / 2


def views(size: int) -> tuple[Tensor, ...]:
    return torch.randn(size, TOKENS, OUT), torch.randn(size, TOKENS, OUT)


def numbered(size: int) -> tuple[Tensor, ...]:
    return *views(size), torch.randint(0, 64, (size,))


def first_is_right(model: nn.Module, batch: Any) -> Tensor:
    out = model(*batch)
    return F.cross_entropy(out, torch.zeros(len(out), dtype=torch.long, device=out.device))


queue = SimpleNamespace(model=Queue, batch=views, loss=first_is_right)
bank = SimpleNamespace(
    model=Bank, batch=numbered, loss=lambda model, batch: F.cross_entropy(model(*batch), batch[2])
)
two_views = SimpleNamespace(model=TwoViews, batch=views, loss=lambda model, batch: 1 - model(*batch).mean())
