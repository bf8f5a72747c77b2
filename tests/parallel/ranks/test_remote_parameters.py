"""Gradients of the placeholders of other stages' weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memtune.parallel.ranks.remote_parameters import NormAlone, PlaceholderGradients, parameter_places


def _placeholder(dim: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones((1,) * dim, dtype=dtype))


def test_placeholder_gradients_are_the_norms_of_the_parameters_that_have_one() -> None:
    placeholders = {0: _placeholder(2), 2: _placeholder(1, torch.bfloat16), 3: _placeholder(0)}
    PlaceholderGradients().assign(placeholders, torch.tensor([3.0, 9.0, 4.0, 7.0]), [1.0, 1.0, 1.0, 0.0])
    weight, narrow, frozen = placeholders.values()
    assert (weight.grad, narrow.grad) == (torch.tensor([[3.0]]), torch.tensor([4.0], dtype=torch.bfloat16))
    assert isinstance(weight.grad, NormAlone)
    assert frozen.grad is None
    assert nn.utils.clip_grad_norm_([weight, narrow], 1e9) == 5.0


def test_placeholder_gradients_of_later_steps_reuse_the_tensors_of_the_first() -> None:
    gradients, placeholders = PlaceholderGradients(), {1: _placeholder(3), 2: _placeholder(1)}
    gradients.assign(placeholders, torch.tensor([1.0, 2.0, 3.0]), [1.0] * 3)
    first = [each.grad for each in placeholders.values()]
    nn.utils.clip_grad_norm_(placeholders.values(), 1e-3)
    placeholders[1].grad = None
    gradients.assign(placeholders, torch.tensor([1.0, 5.0, 6.0]), [1.0] * 3)
    assert [each.grad for each in placeholders.values()] == first == [5.0, 6.0]
    assert [each.grad is old for each, old in zip(placeholders.values(), first, strict=True)] == [True, True]


def test_placeholder_gradients_follow_parameters_that_are_trained_later() -> None:
    gradients, placeholders = PlaceholderGradients(), {0: _placeholder(1)}
    gradients.assign(placeholders, torch.tensor([1.0]), [1.0])
    placeholders[2] = _placeholder(2)
    gradients.assign(placeholders, torch.tensor([2.0, 3.0, 4.0]), [1.0] * 3)
    assert [float(each.grad) for each in placeholders.values()] == [2.0, 4.0]  # type: ignore[arg-type]


def test_parameter_places_follow_replaced_parameters_and_name_shared_ones_once() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2)))
    model[1][0].weight = model[0].weight
    places = parameter_places(model)
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    assert [name for name, _, _ in places] == ["0.weight", "1.0.bias"]
    assert places[0][1]["weight"] is model[0].weight
