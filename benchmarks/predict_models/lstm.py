"""A language model of two LSTM layers with dropout between them; RMSprop."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM = 1024, 64, 256
global_batch = 8


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.first, self.second = nn.LSTM(DIM, DIM, batch_first=True), nn.LSTM(DIM, DIM, batch_first=True)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.first(self.embed(tokens))
        x, _ = self.second(self.drop(x))
        return self.head(self.drop(x))


def model() -> nn.Module:
    return Recurrent()


def batch(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (size, SEQ + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=1e-3)
