"""A transformer whose batches are padded to their longest sequence."""

import torch
from torch import nn

WIDTH, WORDS = 32, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out((q @ k.mT / WIDTH).softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model():
    return Model()


def batch_of(size, length):
    return torch.randint(0, WORDS, (size, length))


def batch(size):
    return batch_of(size, int(torch.randint(8, 64, (size,)).max()))


def loss(model, batch):
    logits = model(batch)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())
