"""LoRA of rank 8 on queries and values of decoder models in bfloat16, with head and loss in chunks of 128
tokens, as Lit-GPT trained them: Fabric's "bf16-true" returns logits in float32. NAME picks the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from case_sizes import whole, word
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """One model, and the length of the longest training sample."""

    layers: int
    width: int
    inner: int
    vocabulary: int
    rotary: float
    length: int
    heads: int = 32


SHAPES = {
    "phi-1_5": Shape(24, 2048, 8192, 51200, 0.5, 1044),
    "stablelm-3b": Shape(16, 4096, 16384, 50688, 0.25, 1034),
    "llama2-7b": Shape(32, 4096, 11008, 32000, 1.0, 1304),
    "llama2-13b": Shape(40, 5120, 13824, 32000, 1.0, 1304, heads=40),
}
NAME = word("NAME", "phi-1_5")
SHAPE = SHAPES[NAME]
WIDTH, HEAD = SHAPE.width, SHAPE.width // SHAPE.heads
TURNED = int(SHAPE.rotary * HEAD)
PHI, LLAMA = NAME.startswith("phi"), NAME.startswith("llama")
RANK, CHUNK = 8, 128
global_batch = whole("GB", 4)


class RmsNorm(nn.Module):
    """Root-mean-square norm in the type of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        return self.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5))


def _norm() -> nn.Module:
    return RmsNorm() if LLAMA else nn.LayerNorm(WIDTH)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=not LLAMA)


class LoraQkv(nn.Module):
    """The joint projection of queries, keys and values; queries and values have low-rank updates."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.drop = _linear(WIDTH, 3 * WIDTH), nn.Dropout(0.05)
        self.lora_down = nn.Parameter(torch.zeros(2 * RANK, WIDTH))
        self.lora_up = nn.Parameter(torch.zeros(2 * WIDTH, RANK))
        places = torch.arange(3 * WIDTH).view(3, WIDTH)[[0, 2]].reshape(-1)
        self.register_buffer("places", places, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection with its updates."""
        down = F.linear(self.drop(x), self.lora_down)
        up = F.conv1d(down.mT, self.lora_up[:, :, None], groups=2).mT.transpose(0, 1)
        flat = up.new_zeros(up.shape[0] * up.shape[1], 3 * WIDTH)
        flat = flat.index_copy(1, self.places, up.reshape(-1, 2 * WIDTH))
        found: Tensor = self.frozen(x) + flat.view(*up.shape[:2], 3 * WIDTH).transpose(0, 1) * 2.0
        return found


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    part, rest = x[..., :TURNED], x[..., TURNED:]
    half = TURNED // 2
    turned = part * cos + torch.cat((-part[..., half:], part[..., :half]), -1) * sin
    return torch.cat((turned.type_as(x), rest), -1)


class Block(nn.Module):
    """Attention and MLP: one after the other, or in parallel with one norm (phi) or two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.qkv, self.out = _norm(), LoraQkv(), _linear(WIDTH, WIDTH)
        self.second = None if PHI else _norm()
        self.up, self.down = _linear(WIDTH, SHAPE.inner), _linear(SHAPE.inner, WIDTH)
        self.gate = _linear(WIDTH, SHAPE.inner) if LLAMA else None

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return causal attention of `x`."""
        samples, length, _ = x.shape
        joint = self.qkv(x).view(samples, length, SHAPE.heads, 3, HEAD).permute(0, 2, 3, 1, 4)
        query, key, value = (each.reshape(samples, SHAPE.heads, length, HEAD) for each in joint.split(1, 2))
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(found.transpose(1, 2).reshape(samples, length, WIDTH))
        return mixed

    def feed(self, x: Tensor) -> Tensor:
        """Return the MLP of `x`."""
        if self.gate is not None:
            found: Tensor = self.down(F.silu(self.up(x)) * self.gate(x))
        else:
            found = self.down(F.gelu(self.up(x), approximate="tanh" if PHI else "none"))
        return found

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the output of the block."""
        first = self.first(x)
        attended = self.attend(first, cos, sin)
        if LLAMA:
            assert self.second is not None
            x = x + attended
            return x + self.feed(self.second(x))
        return x + attended + self.feed(first if self.second is None else self.second(x))


class Decoder(nn.Module):
    """The language model; returns logits in chunks of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(SHAPE.vocabulary, WIDTH), _norm()
        self.blocks = nn.ModuleList(Block() for _ in range(SHAPE.layers))
        self.head = nn.Linear(WIDTH, SHAPE.vocabulary, bias=PHI)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(SHAPE.length, TURNED), persistent=False)

    def forward(self, ids: Tensor) -> list[Tensor]:
        """Return logits of the next tokens."""
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return [part.float() for part in [self.head(part) for part in self.norm(x).split(CHUNK, 1)]]


def model() -> nn.Module:
    """Return the model in bfloat16 with all but its updates frozen."""
    made = Decoder().to(torch.bfloat16)
    made.cos, made.sin = made.cos.half(), made.sin.half()
    for name, parameter in made.named_parameters():
        parameter.requires_grad = "lora_" in name
    return made


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return token ids and targets of the longest sample's length."""
    ids = torch.randint(SHAPE.vocabulary, (size, SHAPE.length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy, chunk by chunk."""
    parts = [
        F.cross_entropy(part.reshape(-1, SHAPE.vocabulary), wanted.reshape(-1), reduction="none")
        for part, wanted in zip(model(batch[0]), batch[1].split(CHUNK, 1), strict=True)
    ]
    return torch.cat(parts).mean()


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW over the updates."""
    return torch.optim.AdamW([each for each in params if each.requires_grad], lr=3e-4, weight_decay=0.01)
