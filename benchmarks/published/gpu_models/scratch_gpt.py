"""GPT-2 of 124M parameters whose parts are written by hand (rasbt/LLMs-from-scratch, chapter 5), not tied.

With PARTS=torch norms and GELU are torch's; with ATTN=fused queries, keys and values are one product and
attention is torch's. MASK=made builds the causal mask in each forward instead of keeping it. TRUE is the type
of all weights, TF32 allows it for products, FUSED is the optimizer's kernel.
"""

from __future__ import annotations

import torch
from case_sizes import whole, word
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, VOCABULARY = whole("D", 768), whole("H", 12), whole("T", 1024), whole("V", 50257)
DROP, BY_TORCH, FUSED = 0.1, word("PARTS") == "torch", word("ATTN") == "fused"
global_batch = whole("B", 8)
if whole("TF32", 0):
    torch.set_float32_matmul_precision("high")


class Norm(nn.Module):
    """Layer norm of elementary ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized `x`."""
        mean, var = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(var + 1e-5)) + self.shift


class Gelu(nn.Module):
    """GELU by its tanh formula."""

    def forward(self, x: Tensor) -> Tensor:
        """Return GELU of `x`."""
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


def _norm() -> nn.Module:
    return nn.LayerNorm(WIDTH) if BY_TORCH else Norm(WIDTH)


class Attention(nn.Module):
    """Causal attention with three products and a mask."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROP)
        if word("MASK") != "made":
            self.register_buffer("mask", torch.triu(torch.ones(LENGTH, LENGTH), diagonal=1))

    def seen(self, x: Tensor) -> Tensor:
        """Return whether a position is hidden."""
        if word("MASK") != "made":
            return self.mask.bool()[: x.shape[1], : x.shape[1]]
        return torch.triu(torch.ones(x.shape[1], x.shape[1], device=x.device), diagonal=1).bool()

    def forward(self, x: Tensor) -> Tensor:
        """Return attention of `x` (samples, length, width)."""
        key, query, value = (
            layer(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
            for layer in (self.key, self.query, self.value)
        )
        scores = query @ key.transpose(2, 3)
        scores.masked_fill_(self.seen(x), -torch.inf)
        shares = self.drop(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        mixed: Tensor = self.out((shares @ value).transpose(1, 2).reshape(x.shape))
        return mixed


class FusedAttention(nn.Module):
    """Causal attention by torch, with one product for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return attention of `x` (samples, length, width)."""
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=DROP, is_causal=True)
        mixed: Tensor = self.out(found.transpose(1, 2).contiguous().view(x.shape))
        return mixed


class Block(nn.Module):
    """Attention and MLP, each behind a norm and with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = FusedAttention() if FUSED else Attention()
        act = nn.GELU(approximate="tanh") if BY_TORCH else Gelu()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), act, nn.Linear(4 * WIDTH, WIDTH))
        self.norms, self.drop = nn.ModuleList((_norm(), _norm())), nn.Dropout(DROP)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        x = self.drop(self.attention(self.norms[0](x))) + x
        out: Tensor = self.drop(self.mlp(self.norms[1](x))) + x
        return out


class Gpt(nn.Module):
    """The language model; returns its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(DROP)
        self.blocks = nn.Sequential(*(Block() for _ in range(whole("L", 12))))
        self.norm, self.head = _norm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of `ids`."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.head(self.norm(self.blocks(self.drop(x))))
        return logits


def model() -> nn.Module:
    """Return the language model."""
    return Gpt().to(getattr(torch, word("TRUE", "float32")))


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return token ids, and those that follow."""
    ids = torch.randint(VOCABULARY, (size, LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW, fused with FUSED."""
    return torch.optim.AdamW(params, lr=5e-4, weight_decay=0.1, fused=True if whole("FUSED", 0) else None)
