"""batch() returns lists of numbers."""

from torch import nn


def model():
    return nn.Linear(8, 4)


def batch(size):
    return [[0.0] * 8] * size


def loss(model, batch):
    return model(batch).square().mean()
