"""batch() always returns 8 samples."""

import torch
from torch import nn


def model():
    return nn.Linear(8, 4)


def batch(size):
    return torch.randn(8, 8)


def loss(model, batch):
    return model(batch).square().mean()
