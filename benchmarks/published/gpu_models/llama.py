"""Llama 3: STYLE titan (torchtitan: float32 weights that compute in bfloat16) or tune (torchtune: all
bfloat16).

SAC=op recomputes inside the blocks as torchtitan's per-op selective checkpointing does. With PARAM_DTYPE the
config's `param_dtype` casts weights, as FSDP2 does in torchtitan; without, autocast does. LORA is the rank of
updates of a frozen model, on all products of a block but the keys'. With LOSS=compiled the loss saves what a
compiled one saves, the logits, and makes no other tensor of their size but their gradient.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from case_sizes import whole, word
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH, HEADS, GROUPS, INNER = whole("D", 64), whole("H", 4), whole("KV", 2), whole("FF", 128)
VOCABULARY, LENGTH, HEAD = whole("V", 128), whole("T", 32), whole("D", 64) // whole("H", 4)
TITAN, TIED, BY_CONFIG = (
    word("STYLE", "titan") == "titan",
    bool(whole("TIED", 0)),
    bool(whole("PARAM_DTYPE", 0)),
)
CHUNKS, RANK = whole("CHUNKS", 1), whole("LORA", 0)
global_batch = whole("GB", 8)


class Norm(nn.Module):
    """Root-mean-square norm computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input in its own type."""
        with torch.autocast(x.device.type, enabled=False):
            wide = x.float()
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
            return wide.type_as(x) * self.weight.to(x.dtype)


class Product(nn.Linear):
    """A linear layer, with an update of low rank if the case has one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        if RANK:
            self.lora_down, self.lora_up = (
                nn.Linear(*sizes, bias=False) for sizes in ((inputs, RANK), (RANK, outputs))
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, plus that of the update."""
        found = F.linear(x, self.weight)
        return found + 2.0 * self.lora_up(self.lora_down(x)) if RANK else found


def _rotated(x: Tensor, table: Tensor) -> Tensor:
    """Return queries or keys (samples, length, heads, size) with rotary positions: complex, or pairs of
    reals.
    """
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    if TITAN:
        turned = torch.view_as_complex(pairs) * table[None, : x.shape[1], None]
        return torch.view_as_real(turned).flatten(3).type_as(x)
    cos, sin = (table[: x.shape[1], :, i].view(1, x.shape[1], 1, -1) for i in (0, 1))
    even, odd = pairs[..., 0], pairs[..., 1]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(3).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention, keys and values repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = (Product(WIDTH, WIDTH) for _ in range(2))
        self.key = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.value = Product(WIDTH, GROUPS * HEAD)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Return causal attention of `x`."""
        samples, length, _ = x.shape
        query, key, value = (
            each(x).view(samples, length, -1, HEAD) for each in (self.query, self.key, self.value)
        )
        query, key = _rotated(query, table), _rotated(key, table)
        times = HEADS // GROUPS
        key, value = (
            each[:, :, :, None].expand(-1, -1, -1, times, -1).reshape(samples, length, HEADS, HEAD)
            for each in (key, value)
        )
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(found.transpose(1, 2).reshape(samples, length, WIDTH))
        return mixed


class Block(nn.Module):
    """Attention and gated MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.second = Norm(), Attention(), Norm()
        self.gate, self.up = (Product(WIDTH, INNER) for _ in range(2))
        self.down = Product(INNER, WIDTH)

    def body(self, x: Tensor, table: Tensor) -> Tensor:
        """Return the output of the block."""
        x = x + self.attention(self.first(x), table)
        hidden = self.second(x)
        found: Tensor = x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return found

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Return the output of the block, recomputed per op if the case asks for it."""
        if word("SAC") != "op":
            return self.body(x, table)
        kept: Tensor = checkpoint(
            self.body,
            x,
            table,
            use_reentrant=False,
            context_fn=_every_second_product,
            preserve_rng_state=False,
        )
        return kept


def _every_second_product() -> Any:
    """Return contexts that save attention and every second matrix product of a block."""
    aten, seen = torch.ops.aten, Counter[bool]()
    kept = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op == aten.mm.default:
            seen[context.is_recompute] += 1
            saves = seen[context.is_recompute] % 2 == 1
        else:
            saves = op in kept
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """The language model; returns logits in chunks of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), Norm()
        self.layers = nn.ModuleList(Block() for _ in range(whole("L", 2)))
        if not TIED:
            self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        shape = (LENGTH, HEAD // 2) if TITAN else (LENGTH, HEAD // 2, 2)
        table = torch.zeros(shape, dtype=torch.complex64 if TITAN else torch.float32)
        self.register_buffer("table", table, persistent=False)

    def forward(self, ids: Tensor) -> list[Tensor]:
        """Return logits of the next tokens."""
        x = self.tokens(ids)
        x = x.to(torch.bfloat16) if TITAN and not BY_CONFIG else x
        for layer in self.layers:
            x = layer(x, self.table)
        weight = self.tokens.weight if TIED else self.output.weight
        return [F.linear(part, weight) for part in self.norm(x).chunk(CHUNKS, 1)]


def model() -> nn.Module:
    """Return the language model."""
    made = Llama()
    if not TITAN:
        table = made.table
        made = made.to(torch.bfloat16)
        made.table = table
    for name, parameter in made.named_parameters():
        parameter.requires_grad = not RANK or "lora_" in name
    return made


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return token ids, and those that follow."""
    ids = torch.randint(VOCABULARY, (size, LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class FusedLoss(torch.autograd.Function):
    """Summed cross-entropy of logits (rows, vocabulary): one pass over them forward, two backward."""

    @staticmethod
    def forward(context: Any, logits: Tensor, wanted: Tensor) -> Tensor:
        """Return the loss; save logits."""
        context.save_for_backward(logits, wanted)
        return -logits.log_softmax(-1).gather(1, wanted[:, None]).float().sum()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits in their type."""
        logits, wanted = context.saved_tensors
        found = logits.softmax(-1)
        found.scatter_add_(1, wanted[:, None], found.new_full((len(wanted), 1), -1.0))
        return found.mul_(gradients[0].to(logits.dtype)), None


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy, chunk by chunk."""
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=TITAN and not BY_CONFIG):
        logits = model(batch[0])
    if CHUNKS == 1:  # torchtune and torchtitan return them in float32
        logits = [each.float() for each in logits]
    parts = [
        FusedLoss.apply(part.reshape(-1, VOCABULARY), wanted.reshape(-1))  # type: ignore[no-untyped-call]
        if word("LOSS") == "compiled"
        else F.cross_entropy(part.reshape(-1, VOCABULARY).float(), wanted.reshape(-1), reduction="sum")
        for part, wanted in zip(logits, batch[1].chunk(CHUNKS, 1), strict=True)
    ]
    return torch.stack(parts).sum() / batch[1].numel()


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return fused AdamW."""
    return torch.optim.AdamW([each for each in params if each.requires_grad], lr=3e-4, fused=True)
