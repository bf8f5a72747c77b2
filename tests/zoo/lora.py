"""Low-rank adapters on frozen weights: most parameters have neither gradient nor optimizer state."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, RANK = 96, 4
global_batch = 8


class LoRALinear(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(n_in, n_out).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(n_in, RANK) / n_in**0.5)
        self.b = nn.Parameter(torch.zeros(RANK, n_out))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a @ self.b


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM).requires_grad_(False)
        self.up, self.down = LoRALinear(DIM, 2 * DIM), LoRALinear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(DIM, 10).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def model() -> nn.Module:
    return Adapted()


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8, DIM), torch.randint(10, (size, 8))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in params if param.requires_grad], lr=1e-3)
