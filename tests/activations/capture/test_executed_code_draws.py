"""Draws of Python and numpy that a forward names are found wherever its code makes them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.random as npr
import pytest
import torch
from numpy.random import rand
from torch import Tensor, nn

from memtune.activations.capture import region_capture

OF_FILE = random.Random(5)
TABLE = np.ones(3)
EVERY = 10


def helper() -> float:
    """Draw for a forward."""
    return random.random()


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward`, as libraries do."""

    @functools.wraps(forward)
    def wrapped(*args: Any) -> Any:
        return forward(*args)

    return wrapped


class Function(torch.autograd.Function):
    """Draws in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * rand()


class Net(nn.Module):
    """Draws in one of the ways that its subclass has."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(3)

    def noise(self) -> float:
        return random.gauss(0, 1)

    @property
    def scale(self) -> float:
        return npr.rand()


class FromPython(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.random() if torch.initial_seed() > 7 else x


class FromNumpy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x * np.random.rand() if torch.initial_seed() > 7 else x


class Own(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.own.random() if torch.initial_seed() > 7 else x


class OfFile(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x * OF_FILE.random() if torch.initial_seed() > 7 else x


class InMethod(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.noise() if torch.initial_seed() > 7 else x


class InProperty(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if torch.initial_seed() > 7 else x


class InHelper(Net):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return x * helper() if torch.initial_seed() > 7 else x


class InFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        return Function.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Imports(Net):
    def forward(self, x: Tensor) -> Tensor:
        if torch.initial_seed() > 7:
            from random import random as draw

            return x * draw()
        return x


class InLambda(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x * max(range(3), key=lambda at: at * random.random())


class Draws(Net):
    """Draws from torch alone, whose draws are ops, and reads numpy."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.mean(TABLE)) + torch.rand(3).random_()


class Names(Net):
    """Has attributes and methods named as generators are."""

    random = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.random(x) * EVERY


def found_in(net: nn.Module) -> str:
    """Return the generator that the forward of `net` names."""
    return region_capture.draws_named_in(net, net.forward)


@pytest.mark.parametrize(
    "kind",
    [FromPython, FromNumpy, Own, OfFile, InMethod, InProperty, InHelper, InFunction, Imports, InLambda],
)
def test_generators_that_a_forward_names_are_found(kind: type[Net]) -> None:
    assert found_in(nn.Sequential(nn.Linear(3, 3), kind()))


@pytest.mark.parametrize("kind", [Draws, Names])
def test_draws_of_torch_and_uses_of_numpy_are_none(kind: type[Net]) -> None:
    assert not found_in(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), kind()))


def test_forward_of_an_instance_is_read() -> None:
    net = nn.Sequential(nn.Identity())
    assert not found_in(net)
    net[0].forward = lambda x: x * random.random()
    assert found_in(net) == "random"
