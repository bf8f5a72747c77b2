"""GPT-2 with tied embeddings under bfloat16 autocast, with explicit or fused attention (nanoGPT and its
tutorials).
"""

from __future__ import annotations

import torch
from case_sizes import whole, word
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, VOCABULARY = whole("D", 768), whole("H", 12), whole("T", 1024), whole("V", 50304)
BIAS, FUSED = bool(whole("BIAS", 0)), word("ATTN") != "manual"
global_batch = whole("B", 12)
if whole("TF32", 0):
    torch.set_float32_matmul_precision("high")


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.LayerNorm(WIDTH, bias=BIAS) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=BIAS), nn.Linear(WIDTH, WIDTH, bias=BIAS)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=BIAS), nn.Linear(4 * WIDTH, WIDTH, bias=BIAS)
        if not FUSED:
            self.register_buffer("seen", torch.ones(LENGTH, LENGTH).tril()[None, None])

    def attend(self, x: Tensor) -> Tensor:
        """Return causal attention of `x`."""
        samples, length, _ = x.shape
        query, key, value = (
            each.view(samples, length, HEADS, -1).transpose(1, 2) for each in self.qkv(x).split(WIDTH, 2)
        )
        if FUSED:
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = (query @ key.mT) * key.shape[-1] ** -0.5
            scores = scores.masked_fill(self.seen[..., :length, :length] == 0, -torch.inf)
            found = scores.softmax(-1) @ value
        mixed: Tensor = self.out(found.transpose(1, 2).reshape(samples, length, WIDTH))
        return mixed

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        x = x + self.attend(self.before[0](x))
        x = x + self.down(F.gelu(self.up(self.before[1](x))))
        return x


class Gpt(nn.Module):
    """The language model; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(whole("L", 12)))
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=BIAS), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1))


def model() -> nn.Module:
    """Return the language model."""
    return Gpt()


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return token ids, and those that follow."""
    ids = torch.randint(VOCABULARY, (size, LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss, computed under autocast unless DTYPE is fp32."""
    narrow = word("DTYPE", "bf16") == "bf16"
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=narrow):
        found: Tensor = model(*batch)
    return found


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW, fused unless FUSED is 0."""
    return torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), fused=True if whole("FUSED", 1) else None)
