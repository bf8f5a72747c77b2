"""Grouped-query attention, rotary tables passed to the blocks, SGD; IN_CONTEXTS names the code that is
invalid on a share of the positions.
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, HEADS, SHARED, HEAD, LAYERS = 48, 24, 4, 2, 6, 2
WHAT = os.environ.get("IN_CONTEXTS", "")
SEQ = 10 if WHAT == "odd" else 32
global_batch = 16


def rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * tables[0] + torch.cat([-second, first], -1) * tables[1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.kv, self.o = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * SHARED * HEAD), nn.Linear(DIM, DIM)
        self.up, self.down, self.drop = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM), nn.Dropout(0.1)
        self.table = nn.Buffer(torch.linspace(0, 1, SEQ).unsqueeze(-1))
        self.places = nn.Parameter(torch.zeros(SEQ, DIM))

    def attended(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        q = rotated(self.q(x).unflatten(-1, (HEADS, HEAD)).transpose(1, 2), tables)
        k, v = (each.unflatten(-1, (SHARED, HEAD)).transpose(1, 2) for each in self.kv(x).chunk(2, -1))
        k, mask = (
            rotated(k, tables),
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool) if WHAT == "masked" else None,
        )
        causal, drop = WHAT not in ("masked", "both ways"), 0.1 if WHAT == "drops" else 0.0
        out = F.scaled_dot_product_attention(q, k, v, mask, drop, is_causal=causal, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))

    def forward(
        self, x: Tensor, tables: tuple[Tensor, Tensor], more: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if WHAT == "first":
            x = x * self.table[: x.shape[1]]
        elif WHAT == "learned":
            x = x + self.places[: x.shape[1]]
        elif WHAT == "arange":
            x = x * torch.arange(x.shape[1]).unsqueeze(-1)
        elif WHAT in ("conditioned", "mask"):
            x = x + (more.unsqueeze(1) if WHAT == "conditioned" else more[:, :, :DIM].mean())
        x = x + self.drop(self.attended(self.norm_1(x), tables))
        x = x + self.drop(self.down(F.silu(self.up(self.norm_2(x)))))
        return (x, x) if WHAT == "extra outputs" else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.h = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head, self.scale = (
            nn.RMSNorm(DIM),
            nn.Linear(DIM, VOCAB, bias=False),
            nn.Parameter(torch.ones(DIM)),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(tokens.shape[1]), 100.0 ** -torch.linspace(0, 1, HEAD // 2)).repeat(
            1, 2
        )
        x, tables, extra = self.wte(tokens), (angle.cos(), angle.sin()), None
        more = self.wte(tokens[:, 0]) * self.scale if WHAT == "conditioned" else None
        if WHAT == "mask":
            more = torch.zeros(tokens.shape[0], tokens.shape[1], tokens.shape[1])
        for block in self.h:
            x = block(x, tables, more)
            x, extra = x if isinstance(x, tuple) else (x, None)
            x = x * {"between": self.scale, "made": self.scale.tanh()}.get(WHAT, 1.0)
        x = self.head(self.norm(x))
        return x if extra is None else x * (1 + extra.square().mean())


def model() -> nn.Module:
    return Net()


def batch(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (size, SEQ + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def optimizer(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)  # type: ignore[arg-type]
