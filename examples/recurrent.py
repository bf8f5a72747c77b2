"""A recurrent network: no repeated blocks, so memtune uses the parts of the model instead.

    memtune plan examples/recurrent.py --gpus 1 --gpu-type a100-40g
    memtune search examples/recurrent.py --device cpu --trials 4

Embedding, LSTM and head become the blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, SEQ = 32, 48, 24
global_batch = 8


class Reader(nn.Module):
    """An embedding, a two-layer LSTM, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.lstm = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next token."""
        return self.head(self.lstm(self.embed(tokens))[0])


def model() -> nn.Module:
    """Return the reader."""
    return Reader()


def batch(size: int) -> Tensor:
    """Return `size` rows that count upwards from a random start."""
    return (torch.randint(VOCAB, (size, 1)) + torch.arange(SEQ + 1)) % VOCAB


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(params, lr=0.5, momentum=0.9)
