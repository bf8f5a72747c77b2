"""A residual MLP language model whose head is its embedding: one parameter under two names."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM = 200, 16, 64
global_batch = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model() -> nn.Module:
    return Tied()


def batch(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (size, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
