"""Mixture of experts, top-1: how many tokens reach an expert depends on the data (`nonzero`, `index_add`)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM, EXPERTS = 128, 16, 48, 4
global_batch = 8


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            (rows,) = torch.nonzero(chosen == index, as_tuple=True)
            mixed = mixed.index_add(0, rows, expert(tokens[rows]) * weight[rows, None])
        return x + mixed.view_as(x)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model() -> nn.Module:
    return MoE()


def batch(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (size, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
