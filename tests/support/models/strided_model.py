"""A residual MLP with unusual weight strides: transposed, channels last, with gaps (`:gapless`: without
gaps).
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM = 200, 16, 64
global_batch = 8


class Block(nn.Module):
    def __init__(self, gaps: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.up.weight = nn.Parameter(self.up.weight.detach().t().contiguous().t())
        if gaps:
            wide = torch.zeros(DIM, 3 * DIM)
            wide[:, : 2 * DIM] = self.down.weight.detach()
            self.down.weight = nn.Parameter(wide[:, : 2 * DIM])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Strided(nn.Module):
    def __init__(self, gaps: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.mix = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.layers = nn.ModuleList(Block(gaps) for _ in range(4))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.mix(x.unflatten(-1, (2, -1)).transpose(1, 2)).transpose(1, 2).flatten(-2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model() -> nn.Module:
    return Strided(gaps=True)


def batch(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (size, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


gapless = SimpleNamespace(
    model=lambda: Strided(gaps=False), batch=batch, loss=loss, global_batch=global_batch
)
