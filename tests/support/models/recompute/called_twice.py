"""A model that the loss calls twice; the first call is differentiated with create_graph=True in between."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model():
    return Model()


def batch(size):
    return torch.randn(size, 8, 16)


def loss(model, x):
    y = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(y).sum(), y, create_graph=True)
    return model(x).mean() + gradient.pow(2).mean()
