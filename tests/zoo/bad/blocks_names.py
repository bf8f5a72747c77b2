"""blocks() returns a module that is not in the model."""

import torch
from torch import nn


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def blocks(model):
    return [model[0], nn.Linear(8, 8)]


def batch(size):
    return torch.randn(size, 8), torch.randn(size, 4)


def loss(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()
