"""ResNet with bottlenecks: in-place ReLU, BatchNorm, max-pooling; SGD with momentum."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, WIDTH, STAGES, CLASSES = 64, 32, (2, 3, 2), 10
global_batch = 8


class Bottleneck(nn.Module):
    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(n_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, n_out, 1, bias=False), nn.BatchNorm2d(n_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or n_in != n_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = (
            nn.Conv2d(3, WIDTH, 7, 2, 3, bias=False),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(inplace=True),
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        width = WIDTH
        for number, depth in enumerate(STAGES, 1):
            planes, blocks = WIDTH * 2 ** (number - 1), []
            for i in range(depth):
                blocks.append(Bottleneck(width, planes, 2 if i == 0 and number > 1 else 1))
                width = 4 * planes
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.relu(self.bn1(self.conv1(images))))
        for number in range(1, len(STAGES) + 1):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def model() -> nn.Module:
    return ResNet()


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, IMAGE, IMAGE), torch.randint(CLASSES, (size,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-4)
