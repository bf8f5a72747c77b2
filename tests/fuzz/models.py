"""Random workloads as the text of a `model.py`: blocks of pieces drawn from a grammar, and their losses."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

WIDTH, TOKENS, BUCKETS = 16, 6, (2, 4)

PIECES: dict[str, tuple[str, str]] = {
    "mlp": (
        "self.{n} = nn.Sequential(nn.Linear(W, 2 * W), nn.GELU(), nn.Linear(2 * W, W))",
        "x = x + self.{n}(x)",
    ),
    "norm": ("self.{n} = nn.LayerNorm(W)", "x = self.{n}(x)"),
    "attention": (
        "self.{n}, self.{n}o = nn.Linear(W, 3 * W), nn.Linear(W, W)",
        "q, k, v = self.{n}(x).view(*x.shape[:2], 3, 2, W // 2).permute(2, 0, 3, 1, 4)\n"
        "        x = x + self.{n}o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))",
    ),
    "separate": (
        "self.{n}q, self.{n}k, self.{n}v, self.{n}o = (nn.Linear(W, W) for _ in range(4))",
        "q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.{n}q, self.{n}k, self.{n}v))\n"
        "        x = x + self.{n}o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))",
    ),
    "dropout": ("self.{n} = nn.Dropout(0.2)", "x = self.{n}(x)"),
    "buffer": ("self.register_buffer('{n}', torch.linspace(0.5, 1.5, W))", "x = x * self.{n}"),
    "in_place": ("self.{n} = nn.Linear(W, W)", "y = self.{n}(x)\n        y.relu_()\n        x = x + y"),
    "write_view": (
        "self.{n} = nn.Linear(W, W)",
        "y = self.{n}(x).clone()\n        y[:, 0] = 0\n        x = x + y",
    ),
    "view": ("pass", "x = x.transpose(0, 1).contiguous().flip(0).transpose(0, 1)"),
    "twice": ("self.{n} = nn.Linear(W, W)", "x = x + self.{n}(torch.tanh(self.{n}(x)))"),
    "custom": ("pass", "x = Scale.apply(x)"),
    "branch": (
        "self.{n} = nn.Linear(W, W)",
        "x = x + self.{n}(x) if x.shape[0] % 2 == 0 else x - self.{n}(x)",
    ),
    "experts": (
        "self.{n}r, self.{n} = nn.Linear(W, 2), nn.ModuleList(nn.Linear(W, W) for _ in range(2))",
        "g = self.{n}r(x).softmax(-1)\n"
        "        x = x + sum(g[..., i : i + 1] * e(x) for i, e in enumerate(self.{n}))",
    ),
    "batch_norm": ("self.{n} = nn.BatchNorm1d(TOKENS)", "x = self.{n}(x)"),
    "bf16": ("self.{n} = nn.Linear(W, W)", "x = x + torch.tanh(self.{n}(x).to(torch.bfloat16)).float()"),
    "frozen": ("self.{n} = nn.Linear(W, W).requires_grad_(False)", "x = x + torch.tanh(self.{n}(x))"),
    "unused": ("self.{n} = nn.Linear(W, W)", "pass"),
    "unfused": (
        "self.{n}, self.{n}o = nn.Linear(W, 3 * W), nn.Linear(W, W)",
        "q, k, v = self.{n}(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)\n"
        "        x = x + self.{n}o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))",
    ),
    "conv": ("self.{n} = nn.Conv1d(W, W, 3, padding=1)", "x = x + self.{n}(x.mT).mT"),
    "positions": ("self.{n} = nn.Parameter(torch.randn(TOKENS, W))", "x = x + self.{n}[: x.shape[1]]"),
    "checkpoint": (
        "self.{n} = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))",
        "x = x + torch.utils.checkpoint.checkpoint(self.{n}, x, use_reentrant=False)",
    ),
    "weight_norm": (
        "self.{n} = nn.utils.parametrizations.weight_norm(nn.Linear(W, W))",
        "x = x + torch.tanh(self.{n}(x))",
    ),
    "autocast": (
        "self.{n} = nn.Linear(W, W)",
        "with torch.autocast(x.device.type, torch.bfloat16): y = self.{n}(x)\n"
        "        x = x + torch.tanh(y.float())",
    ),
    "bank": (
        "self.register_buffer('{n}', torch.zeros(4, W))",
        "self.{n}.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)\n        x = x + self.{n}.mean(0)",
    ),
    "packed": (
        "self.{n} = nn.LSTM(W, W, batch_first=True)",
        "lengths = [x.shape[1], *[x.shape[1] - 1] * (x.shape[0] - 1)]\n"
        "        y, _ = self.{n}(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))\n"
        "        x = x + nn.utils.rnn.pad_packed_sequence(y, batch_first=True)[0]",
    ),
    "sampled": (
        "self.{n} = nn.Linear(W, W)",
        "x = x + 0.1 * torch.distributions.Normal(self.{n}(x), 1.0).rsample()",
    ),
    "draw": ("pass", "x = x * (1 + 0.1 * random.random())"),
    "late_draw": (
        "pass",
        "if torch.initial_seed() > 7: x = x * (1 + 0.1 * numpy.random.rand())  # from the second step on",
    ),
    "router": (
        "self.{n} = nn.Linear(W, 2)",
        "g = self.{n}(x).softmax(-1)\n"
        "        self.routed = g.mean((0, 1)).pow(2).sum()  # for the loss, as routers of experts\n"
        "        x = x * g[..., :1]",
    ),
    "own_generator": ("self.{n} = random.Random(3)", "x = x * (1 + 0.1 * self.{n}.random())"),
}
"""Name → the line of `__init__` and the lines of `forward`; `{n}` is the attribute."""
STATISTICS = (
    *("dropout", "batch_norm", "branch", "bank", "autocast"),
    *("sampled", "draw", "late_draw", "own_generator"),
)
"""Pieces whose result depends on the split of the batch or on random numbers, or is rounded to few bits."""
LOSSES = {
    "mean": "return (out - y).pow(2).mean()",
    "twice": "return (out - y).pow(2).mean() + model(x * 0.5).mean()",
    "tokens": "return F.cross_entropy(out.flatten(0, 1), y.argmax(-1).flatten())",
    "penalty": (
        "g = torch.autograd.grad(out.sum(), p, create_graph=True)[0]\n"
        "    return (out - y).pow(2).mean() + g.pow(2).mean()"
    ),
    "item": "return (out - y).pow(2).mean() * (1.0 if out.shape[0] else 0.0)",
    "decay": "return (out - y).pow(2).mean() + 0.01 * sum(p.pow(2).sum() for p in model.parameters())",
    "teacher": (
        "with torch.no_grad(): wanted = model(x * 0.5)\n"
        "    return (out - y).pow(2).mean() + (out - wanted).pow(2).mean()"
    ),
    "routed": (
        "return (out - y).pow(2).mean() + sum(m.routed for m in model.modules() if hasattr(m, 'routed'))"
    ),
    "func": "return torch.func.vmap(lambda a, b: (a - b).pow(2).mean())(out, y).mean()",
}
BATCHES = {
    "fixed": "return torch.randn(size, tokens, W), torch.randn(size, tokens, W)",
    "nested": "return {'x': torch.randn(size, tokens, W), 'y': [torch.randn(size, tokens, W)]}",
}


@dataclass(frozen=True)
class ModelSpec:
    """A random workload."""

    pieces: tuple[str, ...]
    blocks: int
    loss: str
    batch: str
    tied: bool
    """The last block's weights are those of the first one."""
    nested: bool
    """Blocks return a tuple with a dict."""
    adam: bool
    buckets: bool = False
    """It declares length buckets, and trains on batches of each."""
    groups: bool = False
    """The optimizer has two parameter groups."""

    def text(self) -> str:
        """Return the `model.py`."""
        made = [PIECES[p][0].format(n=f"{p}_{i}") for i, p in enumerate(self.pieces)]
        run = [PIECES[p][1].format(n=f"{p}_{i}") for i, p in enumerate(self.pieces)]
        indent = "\n        "
        returned = "(x, {'aux': x.mean()})" if self.nested else "x"
        call = "x, aux = block(x)" if self.nested else "x = block(x)"
        unpack = "x, y = batch['x'], batch['y'][0]" if self.batch == "nested" else "x, y = batch"
        needs_gradient = (
            "x = x.clone().requires_grad_(True)\n    p = x" if self.loss == "penalty" else "p = x"
        )
        optimizer = "AdamW(params, 1e-3" if self.adam else "SGD(params, 0.05, momentum=0.9"
        given = (
            "[{'params': list(params[::2])}, {'params': list(params[1::2]), 'weight_decay': 0.1, 'lr': 0.01}]"
        )
        lengths = ", ".join(map(str, (*BUCKETS, TOKENS)))
        buckets = (
            f"def buckets(size):\n    return [batch_of(size, tokens) for tokens in ({lengths})]"
            if self.buckets
            else ""
        )
        tie = "self.blocks[-1].load_state_dict(self.blocks[0].state_dict()); self.blocks[-1] = self.blocks[0]"
        return f"""import random

import numpy
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

W, TOKENS = {WIDTH}, {TOKENS}


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s + x * s * (1 - s))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        {indent.join(made)}

    def forward(self, x):
        {indent.join(run)}
        return {returned}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(W, W)
        self.blocks = nn.ModuleList(Block() for _ in range({self.blocks}))
        {tie if self.tied else "pass"}
        self.head = nn.Linear(W, W)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            {call}
        return self.head(x)


def model():
    return Model()


def batch_of(size, tokens):
    {BATCHES[self.batch]}


def batch(size):
    return batch_of(size, TOKENS)


{buckets}


def loss(model, batch):
    {unpack}
    {needs_gradient}
    out = model(x)
    {LOSSES[self.loss]}


def optimizer(params):
    params = {"list(params)" if self.groups else "params"}
    return torch.optim.{optimizer.replace("params", given) if self.groups else optimizer}, foreach=False)
"""


def draw_model(random: Random, *, ranks: int, adam: bool) -> ModelSpec:
    """Return a random workload; on several ranks one without statistics over a micro-batch."""
    loss = random.choices(list(LOSSES), [6, 1, 6, 0.5, 1, 1, 1, 1, 0.5])[0]
    allowed = [p for p in PIECES if ranks == 1 or p not in STATISTICS]
    if loss == "penalty":  # torch has no second derivative of fused attention
        allowed = [p for p in allowed if p not in ("attention", "separate")]
    pieces = tuple(random.choices(allowed, k=random.choice([1, 1, 2, 2, 3, 5])))
    return ModelSpec(
        pieces=pieces,
        blocks=random.choice([1, 2, 2, 2, 3, 4]),
        loss=loss,
        batch=random.choice(list(BATCHES)),
        tied=random.random() < 0.07,
        nested=random.random() < 0.15,
        adam=adam,
        buckets="batch_norm" not in pieces and random.random() < 0.25,  # whose channels are the tokens
        groups=random.random() < 0.2,
    )
