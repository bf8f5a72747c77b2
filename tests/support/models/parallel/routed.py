"""A convolution, then layers of experts that are called only if some token is routed to them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, SEQ, EXPERTS = 16, 8, 4
global_batch = 8


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        tokens, mixed = self.norm(x), torch.zeros_like(x)
        for index in chosen.unique().tolist():  # the others have no token, and are not called
            (rows,) = torch.nonzero(chosen == index, as_tuple=True)
            mixed = mixed.index_add(0, rows, self.experts[index](tokens[rows]))
        return x + mixed


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.depthwise = (
            nn.Conv1d(2, DIM, 3, padding=1),
            nn.Conv1d(DIM, DIM, 3, groups=DIM, padding=1),
        )
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x: Tensor) -> Tensor:
        task = x[:, 0, 0].long() % EXPERTS  # by sample: ranks call other experts than others
        x = self.depthwise(F.gelu(self.conv(x))).transpose(1, 2).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, task.repeat_interleave(SEQ))
        return self.head(x)


def model() -> nn.Module:
    return Routed()


def batch(size: int) -> Tensor:
    task = torch.randint(EXPERTS - 1, (1,))  # one a micro-batch; the last expert is never called
    x = torch.randn(size, 2, SEQ)
    x[:, 0, 0] = task.float()
    return x


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch.transpose(1, 2).flatten(0, 1))
