"""loss() returns one number per sample."""

import torch
from torch import nn


def model():
    return nn.Linear(8, 4)


def batch(size):
    return torch.randn(size, 8), torch.randn(size, 4)


def loss(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean(dim=1)
