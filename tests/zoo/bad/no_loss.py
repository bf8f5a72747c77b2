"""model() and batch() are there, loss() is not."""

import torch
from torch import nn


def model():
    return nn.Linear(8, 4)


def batch(size):
    return torch.randn(size, 8)
