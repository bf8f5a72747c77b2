"""LLaMA-like: RMSNorm, rotary positions, grouped-query attention, SwiGLU; fused AdamW."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM, HEADS, KV_HEADS, HIDDEN, LAYERS = 2048, 128, 256, 8, 2, 688, 5
HEAD = DIM // HEADS
global_batch = 8


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    return torch.cat((one * cos - two * sin, one * sin + two * cos), dim=-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(), RMSNorm()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = (
            nn.Linear(DIM, KV_HEADS * HEAD, bias=False),
            nn.Linear(DIM, KV_HEADS * HEAD, bias=False),
        )
        self.o = nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (
            project(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(), nn.Linear(DIM, VOCAB, bias=False)
        angle = torch.outer(torch.arange(SEQ).float(), 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def model() -> nn.Module:
    return Llama()


def batch(size: int) -> Tensor:
    return torch.randint(VOCAB, (size, SEQ))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(batch)
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch[:, 1:].reshape(-1))


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-4, fused=True)
