"""A language model on a two-layer LSTM with dropout between the layers: a model without repeated blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM = 128, 16, 64
global_batch = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.lstm = nn.LSTM(DIM, DIM, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states)


def model() -> nn.Module:
    return Net()


def batch(size: int) -> Tensor:
    return torch.randint(VOCAB, (size, SEQ + 1))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
