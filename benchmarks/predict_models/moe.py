"""Mixture of experts: top-2 routing over a fixed capacity, dense dispatch by one-hot masks, a
balancing loss.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM, HEADS, LAYERS, EXPERTS, TOP = 1024, 64, 128, 4, 3, 4, 2
global_batch = 8


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 4 * DIM) * 0.02)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * DIM, DIM) * 0.02)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        weight, chosen = scores.topk(TOP, dim=-1)
        capacity = tokens.shape[0] * TOP // EXPERTS
        picked = F.one_hot(chosen, EXPERTS).flatten(0, 1)
        place = (picked.cumsum(0) - 1) * picked
        fits = picked.bool() & (place < capacity)
        slots = F.one_hot(place.clamp(max=capacity - 1), capacity) * fits[..., None]
        mask = slots.unflatten(0, (-1, TOP)).to(x.dtype)
        inside = torch.einsum("tkec,td->ecd", mask, tokens)
        outside = torch.bmm(F.gelu(torch.bmm(inside, self.up)), self.down)
        mixed = torch.einsum("tkec,tk,ecd->td", mask, weight, outside)
        balance = EXPERTS * (scores.mean(0) * picked.float().mean(0)).sum()
        return mixed.view_as(x), balance


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out, self.experts = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        mixed, balance = self.experts(self.norm_2(x))
        return x + mixed, balance


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, balances = self.embed(tokens), []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()


def model() -> nn.Module:
    return MoE()


def batch(size: int) -> Tensor:
    return torch.randint(VOCAB, (size, SEQ + 1))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits, balance = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) + 0.01 * balance
