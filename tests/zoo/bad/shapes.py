"""The model takes 16 features, the batch has 8: fails at line 17, in loss."""

import torch
from torch import nn


def model():
    return nn.Linear(16, 4)


def batch(size):
    return torch.randn(size, 8), torch.randn(size, 4)


def loss(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()
