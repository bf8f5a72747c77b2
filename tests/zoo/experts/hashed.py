"""Mixture of experts routed by token (hash layers): a batch of one task uses one expert in each layer, the
next batch another.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TASKS, TOKENS, SEQ, DIM = 4, 16, 16, 32
global_batch = 8


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.experts = nn.ModuleList(Expert() for _ in range(TASKS))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        mixed = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            (mine,) = torch.nonzero(task.flatten() == index, as_tuple=True)
            mixed = mixed.index_add(0, mine, expert(rows[mine]))
        return x + mixed.view_as(x)


class Hashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TASKS * TOKENS, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(DIM, TASKS * TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, tokens // TOKENS)
        return self.head(x)


def model() -> nn.Module:
    return Hashed()


def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


def batch(size: int) -> tuple[Tensor, Tensor]:
    task = int(torch.randint(TASKS, ()))
    tokens = task * TOKENS + torch.randint(TOKENS, (size, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
