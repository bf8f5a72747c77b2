"""Holds a model class and a training function, yet no model()."""

import torch
from torch import nn


class Net(nn.Module):
    pass


def train():
    pass


def batch(size):
    return torch.randn(size, 8), torch.randn(size, 4)


def loss(model, batch):
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()
