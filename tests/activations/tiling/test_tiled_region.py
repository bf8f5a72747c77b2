"""Modules over parts of their tokens or samples against the plain module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtune.activations.tiling.tiled_region import install_tiled_modules
from memtune.activations.tiling.tiled_region_pass import Tiling
from memtune.errors import ApplyError


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
    install_tiled_modules(context, {"0": Tiling(2, again)}, check="tiled")
    model(x).square().sum().backward()
    assert context.checks["tiled"]() == {"modules": 1, "runs_in_parts": 1}
    torch.testing.assert_close([each.grad for each in model.parameters()], wanted)


@pytest.mark.parametrize("again", [True, False])
def test_hooks_of_parameters_get_the_whole_gradient_once(again: bool) -> None:
    """`autograd.grad` of a part called them as well: a hook that halves gradients quartered them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)))
    seen: list[Tensor] = []

    def halved(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient / 2

    for each in model.parameters():
        each.register_hook(halved)
    x = torch.rand(1, 4, 4)
    found = []
    for tiled in (False, True):
        if tiled:
            context: Any = SimpleNamespace(model=model, checks={})
            install_tiled_modules(context, {"0": Tiling(2, again)}, check="tiled")
        seen.clear()
        model.zero_grad()
        model(x).square().sum().backward()
        found.append(([each.grad for each in model.parameters()], sorted(seen, key=lambda each: each.shape)))
    torch.testing.assert_close(found[1], found[0])


class Attention(nn.Module):
    """Is called as nn.MultiheadAttention is, and returns what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.is_mixed = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: Tensor, keys: Tensor, *, scale: float) -> tuple[Tensor, None]:
        scores = torch.softmax(self.queries(x) @ self.keys(keys).mT * scale, 0 if self.is_mixed else -1)
        return scores @ x, None


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, scale=0.5)[0]
        return out


@pytest.mark.parametrize("again", [True, False])
def test_modules_run_over_parts_of_their_samples_in_the_form_of_the_call(again: bool) -> None:
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(4, 3, 4, requires_grad=True)
    model(x).square().sum().backward()
    wanted = [x.grad, *(each.grad for each in model.parameters())]
    x.grad = None
    model.zero_grad()
    context: Any = SimpleNamespace(model=model, checks={})
    install_tiled_modules(context, {"attention": Tiling(2, again, by_sample=True)}, check="tiled")
    model(x).square().sum().backward()
    assert context.checks["tiled"]() == {"modules": 1, "runs_in_parts": 1}
    torch.testing.assert_close([x.grad, *(each.grad for each in model.parameters())], wanted)


def test_modules_that_mix_samples_are_refused_at_their_first_call() -> None:
    model = Attends()
    model.attention.is_mixed = True
    context: Any = SimpleNamespace(model=model, checks={})
    install_tiled_modules(context, {"attention": Tiling(2, by_sample=True)}, check="tiled")
    with pytest.raises(ApplyError, match="does not treat samples independently"):
        model(torch.randn(4, 3, 4))
