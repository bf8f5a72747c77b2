"""A GPT whose blocks hold the linear layers of attention and a gated MLP themselves, the MLP's down layer
before its up layer.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM, HEAD, LAYERS = 64, 16, 32, 8, 2
global_batch = 8


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.wq, self.wv, self.wo = (nn.Linear(DIM, DIM) for _ in range(3))
        self.wk = nn.Linear(DIM, DIM, bias=False)
        self.w1, self.w2 = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)
        self.w3 = nn.Linear(DIM, 2 * DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, HEAD)).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class GPT(nn.Module):
    def __init__(self, heads: int = -1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.layers = nn.ModuleList(Block(heads) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    return GPT()


def batch(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (size, SEQ + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class FixedHeads:
    """The same with a number of heads that the code names."""

    global_batch, batch, loss = global_batch, staticmethod(batch), staticmethod(loss)

    def model(self) -> nn.Module:
        return GPT(DIM // HEAD)


fixed_heads = FixedHeads()
