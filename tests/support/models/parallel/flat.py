"""The model of `separate.py` with blocks that hold the linear layers of attention and a gated MLP themselves,
the MLP's down layer before its up layer.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch.nn.functional as F
from separate import DIM, GPT, HEAD, batch, loss
from torch import Tensor, nn

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


def model(heads: int = -1) -> nn.Module:
    made = GPT()
    made.h = nn.ModuleList(Block(heads) for _ in made.h)
    return made


class FixedHeads:
    """The same with a number of heads that the code names."""

    global_batch, batch, loss = global_batch, staticmethod(batch), staticmethod(loss)

    def model(self) -> nn.Module:
        return model(DIM // HEAD)


fixed_heads = FixedHeads()
