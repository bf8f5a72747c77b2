"""Vision transformers and an MLP mixer (Dosovitskiy et al. 2021; Tolstikhin et al. 2021), as timm has them.

D, L, H and FF are width, blocks, heads and inner width, PATCH the side of a patch. ATTN=manual computes
attention in parts. With GATED the MLP has a gate, with SCALED each branch a learned scale (DINOv2), with PRE
patches a norm before the first block (CLIP).
NAME=mixer mixes patches by an MLP of TOKENS units. AMP is the type of autocast, TRUE that of all weights
instead. OPT is the optimizer, with MOMENTUM, as a loop over parameters with LOOP, fused with FUSED. With
READY the images are on the device before the step.
"""

from __future__ import annotations

import torch
from case_sizes import whole, word
from images import CLASSES, DTYPE, SIDE, batch, loss, optimizer_of
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, INNER = whole("D", 64), whole("H", 4), whole("FF", 256)
PATCH = whole("PATCH", 16)
PATCHES = (SIDE // PATCH) ** 2
MIXES, FUSED = word("NAME") == "mixer", word("ATTN") != "manual"
global_batch = whole("B", 8)
zero_grad_to_none = not whole("KEEPS_GRADS", 0)
__all__ = ["batch", "loss", "model", "optimizer"]


class Attention(nn.Module):
    """Attention of all patches to all."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return attention of `x` (samples, patches, width)."""
        samples, patches, _ = x.shape
        query, key, value = (
            self.qkv(x).reshape(samples, patches, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        )
        if FUSED:
            found = F.scaled_dot_product_attention(query, key, value)
        else:
            scores = (query @ key.transpose(-2, -1)) * query.shape[-1] ** -0.5
            found = scores.softmax(-1) @ value
        mixed: Tensor = self.out(found.transpose(1, 2).reshape(samples, patches, WIDTH))
        return mixed


class Mlp(nn.Module):
    """Two linear layers around GELU; gated: three around SiLU."""

    def __init__(self, width: int, inner: int, *, gated: bool = False) -> None:
        super().__init__()
        self.gated = gated
        self.up, self.down = nn.Linear(width, (1 + gated) * inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layers."""
        hidden = self.up(x)
        if self.gated:
            gate, wide = hidden.chunk(2, -1)
            hidden = F.silu(gate) * wide
        else:
            hidden = F.gelu(hidden)
        found: Tensor = self.down(hidden)
        return found


class OverPatches(Mlp):
    """An MLP over the patches of each channel."""

    def __init__(self) -> None:
        super().__init__(PATCHES, whole("TOKENS", 32))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixed patches (samples, patches, width)."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    """Attention, or an MLP over patches, and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.mix: nn.Module = OverPatches() if MIXES else Attention()
        self.mlp = Mlp(WIDTH, INNER, gated=bool(whole("GATED", 0)))
        if whole("SCALED", 0):
            self.scales = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 1e-5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        for place, (norm, part) in enumerate(((self.first, self.mix), (self.second, self.mlp))):
            found = part(norm(x))
            x = x + (found * self.scales[place] if whole("SCALED", 0) else found)
        return x


class Classifier(nn.Module):
    """Patches, blocks and a linear layer on the class token, or on the mean of a mixer's patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        if not MIXES:
            self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
            self.positions = nn.Parameter(torch.zeros(1, PATCHES + 1, WIDTH))
        self.pre = nn.LayerNorm(WIDTH) if whole("PRE", 0) else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(whole("L", 2)))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of classes."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        if not MIXES:
            x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        x = self.pre(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x.mean(1) if MIXES else x[:, 0])
        return logits


def model() -> nn.Module:
    """Return the classifier."""
    return Classifier().to(DTYPE)


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of the case."""
    return optimizer_of(params, "AdamW", lr=1e-4, fused=True if whole("FUSED", 0) else None)
