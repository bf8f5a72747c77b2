"""T5-like: encoder and decoder with cross-attention, relative position biases, RMS norms; Adafactor from
torch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SOURCE, TARGET, DIM, HEADS, LAYERS = 1024, 96, 64, 192, 6, 3
global_batch = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (
            project(each).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project, each in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = q @ k.transpose(-1, -2)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        return self.o((F.dropout(weights, 0.1, self.training) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, crossing: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.cross_norm = nn.RMSNorm(DIM) if crossing else None
        self.cross = Attention() if crossing else None
        self.ff_norm, self.wi, self.wo = (
            nn.RMSNorm(DIM),
            nn.Linear(DIM, 4 * DIM, bias=False),
            nn.Linear(4 * DIM, DIM, bias=False),
        )

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, bias)
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            x = x + self.cross(self.cross_norm(x), memory, None)
        return x + self.wo(F.relu(self.wi(self.ff_norm(x))))


class Stack(nn.Module):
    def __init__(self, crossing: bool) -> None:
        super().__init__()
        self.distances = nn.Embedding(32, HEADS)
        self.causal = crossing
        self.block, self.norm = nn.ModuleList(Layer(crossing) for _ in range(LAYERS)), nn.RMSNorm(DIM)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        bias = self.distances((at[:, None] - at).abs().clamp(max=31)).permute(2, 0, 1)
        if self.causal:
            bias = bias.masked_fill(at[:, None] < at, float("-inf"))
        for layer in self.block:
            x = layer(x, bias, memory)
        return self.norm(x)


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, DIM)
        self.encoder, self.decoder = Stack(False), Stack(True)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.lm_head(self.decoder(self.shared(target), self.encoder(self.shared(source))))


def model() -> nn.Module:
    return T5()


def batch(size: int) -> tuple[Tensor, Tensor, Tensor]:
    target = torch.randint(VOCAB, (size, TARGET + 1))
    return torch.randint(VOCAB, (size, SOURCE)), target[:, :-1].contiguous(), target[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    source, target, labels = batch
    return F.cross_entropy(model(source, target).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=1e-2)
