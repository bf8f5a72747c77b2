"""batch() raises, at line 12: its data set is too small."""

import torch
from torch import nn


def model():
    return nn.Linear(8, 4)


def batch(size):
    return torch.randn(1, 8)[[size]]


def loss(model, batch):
    return model(batch).square().mean()
