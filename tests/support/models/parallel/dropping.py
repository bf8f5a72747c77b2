"""The model of `separate.py` with dropout of attention's weights, which share keys, and of what it adds."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch.nn.functional as F
from separate import DIM, GPT, HEAD, batch, loss
from torch import Tensor, nn

__all__ = ["batch", "loss", "model"]
global_batch = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.kv_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, 4 * HEAD, bias=False)
        self.out_proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        k, v = (each.unflatten(-1, (2, HEAD)).transpose(1, 2) for each in self.kv_proj(x).chunk(2, -1))
        p = 0.2 if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


def model() -> nn.Module:
    made = GPT()
    for block in made.h:
        block.attn = Attention()  # type: ignore[assignment]
    return made
