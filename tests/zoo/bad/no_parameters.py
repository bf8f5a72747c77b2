"""model() returns a module without parameters."""

import torch
from torch import nn


def model():
    return nn.ReLU()


def batch(size):
    return torch.randn(size, 8), torch.randn(size, 4)


def loss(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()
