"""MPT: learned positions, GELU, biases, tied head, flash attention (llm-foundry). The residual stream is
bfloat16, as FSDP's mixed precision has it: with PARAM_DTYPE the config's `param_dtype` casts, else autocast
does.
"""

from __future__ import annotations

import torch
from case_sizes import whole
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH, VOCABULARY = whole("D", 64), whole("H", 4), whole("T", 32), whole("V", 128)
BY_CONFIG = bool(whole("PARAM_DTYPE", 0))
global_batch = whole("GB", 8)


class Norm(nn.LayerNorm):
    """Layer norm in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(
                x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps
            )


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Norm(WIDTH), Norm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        samples, length, _ = x.shape
        query, key, value = (
            each.view(samples, length, HEADS, -1).transpose(1, 2)
            for each in self.qkv(self.first(x)).chunk(3, 2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, WIDTH))
        x = x + self.down(F.gelu(self.up(self.second(x))))
        return x


class Mpt(nn.Module):
    """The language model; returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(whole("L", 2)))
        self.norm = Norm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of the next tokens."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = x if BY_CONFIG else x.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def model() -> nn.Module:
    """Return the language model."""
    return Mpt()


def batch(size: int) -> Tensor:
    """Return token ids."""
    return torch.randint(VOCABULARY, (size, LENGTH))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the cross-entropy."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=not BY_CONFIG):
        logits = model(batch)
        return F.cross_entropy(logits.view(-1, VOCABULARY), batch.roll(-1, 1).view(-1))


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95))
