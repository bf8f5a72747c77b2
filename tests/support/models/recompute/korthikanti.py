"""A GPT as Korthikanti et al. count it: 16-bit, attention that is not fused, dropout masks of one byte."""

import torch
from torch import Tensor, nn

SEQ, DIM, HEADS, LAYERS = 64, 256, 4, 2


def dropped(x: Tensor) -> Tensor:
    return torch.native_dropout(x, 0.1, True)[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) / (DIM // HEADS) ** 0.5
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool, device=x.device).tril()
        probabilities = dropped(scores.masked_fill(~mask, -torch.inf).softmax(-1))
        return self.out((probabilities @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + dropped(self.attend(self.ln_1(x)))
        return x + dropped(self.down(nn.functional.gelu(self.up(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def model() -> nn.Module:
    return GPT().bfloat16()


def batch(size: int) -> Tensor:
    return torch.randn(size, SEQ, DIM, dtype=torch.bfloat16)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()
