"""A GPT of eight small blocks with one shared mask and an untied head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM, HEADS, LAYERS = 32, 8, 16, 2, 8
global_batch = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 3 * DIM, bias=False),
            nn.Linear(DIM, DIM),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        scores = (q @ k.transpose(-1, -2) / (DIM // HEADS) ** 0.5).masked_fill(mask, -1e9)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x, mask = self.wte(tokens) + self.wpe(places), places[:, None] < places
        for block in self.h:
            x = block(x, mask=mask)
        return self.head(self.norm(x))


def model() -> nn.Module:
    return GPT()


def batch(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (size, SEQ + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
