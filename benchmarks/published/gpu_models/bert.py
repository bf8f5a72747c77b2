"""BERT with explicit attention and dropout (Devlin et al. 2019).

TASK is squad (a span of the sequence) or mlm (PREDICTED masked tokens of each sequence, and the next
sentence). AMP is the type of autocast, TF32 allows it for products.
"""

from __future__ import annotations

import torch
from case_sizes import real, whole, word
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, VOCABULARY = whole("D", 64), whole("H", 4), whole("T", 32), whole("V", 128)
DROP, SPANS, PREDICTED = real("P", 0.1), word("TASK", "squad") == "squad", whole("PREDICTED", 4)
global_batch = whole("B", 8)
torch.backends.cuda.matmul.allow_tf32 = bool(whole("TF32", 0))


class Block(nn.Module):
    """Attention and MLP, each before a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps=1e-12) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the output of the block."""
        samples, length, _ = x.shape
        query, key, value = (
            each(x).view(samples, length, HEADS, -1).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        scores = (query @ key.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5 + mask
        shares = F.dropout(scores.softmax(-1), DROP)
        mixed = self.out((shares @ value).transpose(1, 2).reshape(samples, length, WIDTH))
        x = self.norms[0](F.dropout(mixed, DROP) + x)
        return self.norms[1](F.dropout(self.down(F.gelu(self.up(x))), DROP) + x)  # type: ignore[no-any-return]


class Bert(nn.Module):
    """The encoder, with the layers of its task."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.types, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.blocks = nn.ModuleList(Block() for _ in range(whole("L", 2)))
        if SPANS:
            self.span = nn.Linear(WIDTH, 2)
        else:
            self.pool, self.follows = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
            self.change, self.changed = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
            self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, ids: Tensor, seen: Tensor, types: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits: of starts and ends, or of masked tokens and of the next sentence."""
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.tokens(ids) + self.positions(place) + self.types(types))
        x = F.dropout(x, DROP)
        mask = (1.0 - seen[:, None, None].to(x.dtype)) * -1e4
        for block in self.blocks:
            x = block(x, mask)
        if SPANS:
            start, end = self.span(x).unbind(-1)
            return start, end
        masked = x.gather(1, chosen[..., None].expand(-1, -1, WIDTH))
        masked = self.changed(F.gelu(self.change(masked)))
        return F.linear(masked, self.tokens.weight, self.bias), self.follows(self.pool(x[:, 0]).tanh())


def model() -> nn.Module:
    """Return the model."""
    return Bert()


def batch(size: int) -> tuple[Tensor, ...]:
    """Return ids, mask, types, places of masked tokens, and what is to be found."""
    ids, ones = torch.randint(VOCABULARY, (size, LENGTH)), torch.ones(size, LENGTH, dtype=torch.long)
    chosen = torch.randint(LENGTH, (size, PREDICTED))
    wanted = torch.randint(LENGTH, (size,)) if SPANS else torch.randint(VOCABULARY, (size, PREDICTED))
    return ids, ones, torch.zeros_like(ids), chosen, wanted, torch.randint(2, (size,))


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the sum of both cross-entropies."""
    *given, wanted, other = batch
    narrow = getattr(torch, word("AMP", "float16"))
    with torch.autocast(given[0].device.type, narrow, enabled=bool(word("AMP"))):
        first, second = model(*given)
        first = first if SPANS else first.reshape(-1, VOCABULARY)
        return F.cross_entropy(first.float(), wanted.flatten()) + F.cross_entropy(second.float(), other)


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return fused AdamW."""
    return torch.optim.AdamW(params, lr=1e-4, fused=True)
