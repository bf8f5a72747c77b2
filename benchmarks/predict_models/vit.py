"""ViT: convolutional patches, a class token, stochastic depth in the last blocks, mixed targets; SGD with
momentum.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, PATCH, DIM, HEADS, LAYERS, CLASSES = 64, 8, 256, 8, 6, 100
global_batch = 8


class Block(nn.Module):
    def __init__(self, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, eps=1e-6), nn.LayerNorm(DIM, eps=1e-6)
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.fc1, self.fc2, self.drop_path = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM), drop_path

    def dropped(self, x: Tensor) -> Tensor:
        if not self.drop_path or not self.training:
            return x
        keep = 1 - self.drop_path
        return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(keep) / keep

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.dropped(self.attn(y, y, y, need_weights=False)[0])
        return x + self.dropped(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.position = nn.Parameter(torch.randn(1, (IMAGE // PATCH) ** 2 + 1, DIM) * 0.02)
        self.blocks = nn.Sequential(*(Block(0.1 * i / LAYERS) for i in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def model() -> nn.Module:
    return ViT()


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, IMAGE, IMAGE), torch.rand(size, CLASSES).softmax(-1)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)
