"""A GPT on real text: pre-LN blocks, learned positions, causal attention, GELU; about 30M parameters by
default.

    memtune search examples/gpt.py --gpus 8
    MEMTUNE_GPT_SIZE=1.3b memtune plan examples/gpt.py --gpus 8 --gpu-type h100-80g

The text is the source of Python's standard library, byte by byte, so there is nothing to download.
Environment variables change the model: MEMTUNE_GPT_SIZE (tiny, 30m, 124m, 350m, 1.3b, 7b), then individually
MEMTUNE_GPT_LAYERS, _DIM, _HEADS, _SEQ, _VOCAB, _DROPOUT, _TIED (0 or 1), _BF16 (1: forward under autocast)
and _BATCH (samples per optimizer step over all ranks).

Shapes: B samples, T tokens, D dim, H heads, V vocabulary.
"""

import functools
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SIZES = {
    # size: (layers, dim, heads, seq, vocab, global batch)
    "tiny": (4, 64, 4, 64, 256, 8),
    # Deep and narrow, few tokens: a step takes a second or two on two CPU cores.
    "30m": (36, 256, 4, 64, 256, 8),
    "124m": (12, 768, 12, 1024, 50304, 64),
    "350m": (24, 1024, 16, 1024, 50304, 64),
    "1.3b": (24, 2048, 16, 2048, 50304, 64),
    "7b": (32, 4096, 32, 2048, 50304, 64),
}


def _setting(name: str, default: float) -> float:
    return float(os.environ.get(f"MEMTUNE_GPT_{name}", default))


_size = _SIZES[os.environ.get("MEMTUNE_GPT_SIZE", "30m").lower()]
LAYERS, DIM, HEADS, SEQ, VOCAB, global_batch = (
    int(_setting(name, default))
    for name, default in zip(("LAYERS", "DIM", "HEADS", "SEQ", "VOCAB", "BATCH"), _size, strict=True)
)
DROPOUT, TIED, BF16 = _setting("DROPOUT", 0.0), bool(_setting("TIED", 1)), bool(_setting("BF16", 0))


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        """Mix each position with earlier ones."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )  # (B, H, T, D/H)
        mixed = F.scaled_dot_product_attention(
            q, k, v, dropout_p=DROPOUT if self.training else 0.0, is_causal=True
        )
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a GELU MLP, each with a layer norm before it and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(DIM), Attention()
        self.ln_2, self.mlp = (
            nn.LayerNorm(DIM),
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)),
        )
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        """Run one transformer layer."""
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """A decoder-only language model; the head shares the weights of the embedding if TIED."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM), nn.Dropout(DROPOUT)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        if TIED:
            self.head.weight = self.wte.weight
        self.apply(self._init)
        for name, param in self.named_parameters():
            if name.endswith(
                ("proj.weight", "mlp.2.weight")
            ):  # what adds to the residual stream, as in GPT-2
                nn.init.normal_(param, std=0.02 / (2 * LAYERS) ** 0.5)

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) → (B, T, V)
        """Return logits of the next token at each position."""
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


@functools.cache
def text() -> Tensor:
    """Return the larger modules of the standard library as one row of bytes (about 3 MB), without their few
    non-ASCII letters.
    """
    library = Path(os.__file__).parent
    parts = [path.read_bytes() for path in sorted(library.glob("*.py")) if path.stat().st_size > 30_000]
    return torch.frombuffer(
        bytearray(b"\n".join(parts).decode("ascii", "ignore").encode()), dtype=torch.uint8
    )


def model() -> nn.Module:
    """Return the GPT, with weights drawn from torch's generator."""
    return GPT()


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return `size` pieces of the text, and the same pieces shifted by one byte."""
    starts = torch.randint(len(text()) - SEQ, (size, 1))
    pieces = text()[starts + torch.arange(SEQ + 1)].long() % VOCAB
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy per byte, in nats."""
    inputs, targets = batch
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=BF16):
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay for matrices, none for vectors."""
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))
