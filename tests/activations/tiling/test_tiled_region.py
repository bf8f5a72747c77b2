"""Modules over parts of their tokens against the plain module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtune.activations.tiling.tiled_region import install_tiled_modules


class Branching(nn.Module):
    """Uses its second weight only for tokens that begin with a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        wanted = x[..., :1] > 0
        out: Tensor = self.always(x)
        return out + self.sometimes(x) * wanted if wanted.any() else out


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("first", [1.0, -1.0])
def test_tiled_modules_add_gradients_of_weights_that_some_parts_use(again: bool, first: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Branching())
    x = torch.rand(1, 4, 4)
    x[0, :, 0] = torch.tensor([first, first, -first, -first])
    model(x).square().sum().backward()
    wanted = [each.grad for each in model.parameters()]
    model.zero_grad()
    context: Any = SimpleNamespace(model=model, checks={})
    install_tiled_modules(context, {"0": 2}, check="tiled", again=again)
    model(x).square().sum().backward()
    assert context.checks["tiled"]() == {"modules": 1, "runs_in_parts": 1}
    torch.testing.assert_close([each.grad for each in model.parameters()], wanted)
