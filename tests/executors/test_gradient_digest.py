"""Sketches of gradients: zero where bits are equal, about the true distance where they are not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from memtune.executors.gradient_digest import BUCKETS, GradientRecord, gradient_records, largest_difference


def of(*gradients: torch.Tensor) -> dict[str, GradientRecord]:
    model = nn.ParameterList(nn.Parameter(torch.zeros_like(each)) for each in gradients)
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = gradient
    return gradient_records(model)


def test_difference_of_equal_gradients_is_zero() -> None:
    gradient = torch.randn(100, 7)
    assert largest_difference(of(gradient), of(gradient.clone())) == (0.0, "")


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), elements=st.integers(1, 5000), log_scale=st.floats(-6, 0))
def test_sketch_distance_is_close_to_gradient_distance(seed: int, elements: int, log_scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(elements, generator=generator, dtype=torch.float64)
    change = torch.randn(elements, generator=generator, dtype=torch.float64) * 10**log_scale
    found, name = largest_difference(of(one + change), of(one))
    true = float(change.norm() / one.norm())
    assert name == "0"
    assert true / 2.5 <= found <= true * 2.5


def test_difference_detects_one_wrong_number() -> None:
    one = torch.randn(300_000)
    other = one.clone()
    other[123_456] += 1.0
    found, _ = largest_difference(of(other), of(one))
    assert found == pytest.approx(1.0 / float(one.norm()), rel=1e-3)


def test_difference_of_rounding_only_gradients_is_relative_to_others() -> None:
    large, noise = torch.randn(1000), torch.randn(10) * 1e-9
    found, name = largest_difference(of(large, -noise), of(large, noise))
    assert name == "1"
    assert found < 1e-7


def test_difference_of_nan_is_not_zero() -> None:
    found, _ = largest_difference(of(torch.tensor([1.0, math.nan])), of(torch.tensor([1.0, 2.0])))
    assert found == math.inf


def test_difference_refuses_other_parameters_and_damaged_sketches() -> None:
    one = of(torch.ones(3))
    with pytest.raises(ValueError, match="only one run"):
        largest_difference(one, {"1": one["0"]})
    with pytest.raises(ValueError, match="buffer"):
        largest_difference({"0": one["0"].model_copy(update={"sha256": "x", "sketch": "AAAA"})}, one)
    assert len(one["0"].projected) == BUCKETS
