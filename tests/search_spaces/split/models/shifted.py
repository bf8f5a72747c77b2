"""A language model whose logits set its peak, and whose loss cuts the last token off them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM = 2048, 48, 32
global_batch = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model() -> nn.Module:
    return Model()


def batch(size: int) -> Tensor:
    return torch.randint(VOCAB, (size, SEQ))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch)
    shifted = logits[..., :-1, :].contiguous()
    targets = batch[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, VOCAB), targets.view(-1))
