"""Transformers of published sizes for `search_quality.py`, recorded on fake tensors.

MEMTUNE_BENCH_MODEL selects one: `lora-13b` (LLaMA-13B shapes, frozen bf16 weights, rank-16 adapters on query
and value), `moe-8x1b` (8 experts in every block, each takes its best quarter of the tokens) or `vit-h`
(ViT-H/14, 224²).
"""

import os
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Shape(NamedTuple):
    layers: int
    dim: int
    heads: int
    tokens: int
    vocabulary: int
    batch: int
    rank: int = 0
    experts: int = 0
    images: bool = False


SHAPES = {
    "lora-13b": Shape(40, 5120, 40, 2048, 32000, 64, rank=16),
    "moe-8x1b": Shape(16, 2048, 16, 2048, 32000, 64, experts=8),
    "vit-h": Shape(32, 1280, 16, 257, 1000, 512, images=True),
}
S = SHAPES[os.environ.get("MEMTUNE_BENCH_MODEL", "vit-h")]
global_batch = int(os.environ.get("MEMTUNE_BENCH_BATCH", S.batch))
PATCH, SIDE = 14, 224


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter, which alone is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(S.dim, S.dim)
        self.a = nn.Parameter(torch.randn(S.rank, S.dim) / S.dim**0.5)
        self.b = nn.Parameter(torch.zeros(S.dim, S.rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x.float() @ self.a.T @ self.b.T).to(x.dtype)


class Experts(nn.Module):
    """Each expert takes the same number of tokens, two of them per token on average."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(S.dim, S.experts, bias=False)
        self.up = nn.Parameter(torch.randn(S.experts, S.dim, 4 * S.dim) * 0.02)
        self.down = nn.Parameter(torch.randn(S.experts, 4 * S.dim, S.dim) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        capacity = 2 * len(tokens) // S.experts
        weight, chosen = self.router(tokens).softmax(-1).T.topk(capacity, dim=-1)  # experts choose tokens
        inside = tokens[chosen.flatten()].unflatten(0, (S.experts, capacity))
        outside = torch.bmm(F.gelu(torch.bmm(inside, self.up)), self.down) * weight[..., None]
        return torch.zeros_like(tokens).index_add(0, chosen.flatten(), outside.flatten(0, 1)).view_as(x)


class Block(nn.Module):
    """Attention, then an MLP or experts, each after a norm and with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(S.dim), nn.LayerNorm(S.dim)
        adapted = Adapted if S.rank else lambda: nn.Linear(S.dim, S.dim)
        self.q, self.v, self.k, self.out = adapted(), adapted(), *(nn.Linear(S.dim, S.dim) for _ in range(2))
        self.mlp = (
            Experts()
            if S.experts
            else nn.Sequential(nn.Linear(S.dim, 4 * S.dim), nn.GELU(), nn.Linear(4 * S.dim, S.dim))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (each(y).unflatten(-1, (S.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=not S.images)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """Token embedding or image patches, blocks, norm, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, S.dim, PATCH, PATCH) if S.images else nn.Embedding(S.vocabulary, S.dim)
        self.blocks = nn.ModuleList(Block() for _ in range(S.layers))
        self.norm, self.head = nn.LayerNorm(S.dim), nn.Linear(S.dim, S.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if S.images:
            x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1) if S.images else x))


def model() -> nn.Module:
    made = Transformer()
    if S.rank:
        for name, parameter in made.named_parameters():
            if not name.endswith((".a", ".b")):
                parameter.requires_grad_(False)
                parameter.data = parameter.data.to(torch.bfloat16)
    return made


def batch(size: int) -> tuple[Tensor, Tensor]:
    if S.images:
        return torch.randn(size, 3, SIDE, SIDE), torch.randint(S.vocabulary, (size,))
    tokens = torch.randint(S.vocabulary, (size, S.tokens + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, target = batch
    with torch.autocast(x.device.type, torch.bfloat16):
        logits = model(x)
    return F.cross_entropy(logits.float().flatten(0, -2), target.flatten())
