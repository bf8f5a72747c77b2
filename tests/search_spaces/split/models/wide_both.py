"""As wide_mlp.py, with a large vocabulary besides."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM = 1024, 48, 32
global_batch = 8


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 8 * DIM), nn.Linear(8 * DIM, DIM)
        self.up.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        _, _, _ = x.shape
        return self.down(F.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*ends, bias=False) for ends in ((DIM, 8 * DIM), (DIM, 8 * DIM), (8 * DIM, DIM))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(Gated() if i % 2 else Plain()) for i in range(4))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model() -> nn.Module:
    return Model()


def batch(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (size, SEQ + 1))
    targets = tokens[:, 1:].clone()
    targets[:, ::5] = -100
    return tokens[:, :-1], targets


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    logits = model(inputs)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
