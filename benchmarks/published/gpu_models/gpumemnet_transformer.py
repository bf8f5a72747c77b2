"""torch's own encoder as a classifier of token sequences; float32, Adam (GPUMemNet's transformers)."""

from __future__ import annotations

import torch
from case_sizes import real, whole
from torch import Tensor, nn

global_batch = whole("B", 8)


class Classifier(nn.Module):
    """Embedding with learned positions, encoder, mean over the sequence, linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        width = whole("E", 64)
        self.tokens = nn.Embedding(whole("V", 100), width)
        self.positions = nn.Parameter(torch.zeros(1, whole("T", 16), width))
        block = nn.TransformerEncoderLayer(
            width, whole("H", 4), whole("FF", 128), dropout=real("P", 0.2), batch_first=True
        )
        self.encoder = nn.TransformerEncoder(block, whole("L", 2))
        self.head = nn.Linear(width, whole("C", 10))

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of the classes."""
        hidden: Tensor = self.encoder(self.tokens(ids) + self.positions)
        logits: Tensor = self.head(hidden.mean(1))
        return logits


def model() -> nn.Module:
    """Return the classifier."""
    return Classifier()


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return token sequences and labels."""
    return torch.randint(whole("V", 100), (size, whole("T", 16))), torch.randint(whole("C", 10), (size,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return Adam."""
    return torch.optim.Adam(params)
