"""Sketches of gradients: zero where bits are equal, about the true distance where they are not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from memtune.executors.gradient_digest import GradientDigests, GradientSums, Region
from memtune.executors.gradient_record import BUCKETS, GradientRecord, largest_difference
from memtune.runtime.placement import Placement


def whole(gradient: torch.Tensor) -> GradientRecord:
    sums, shape = GradientSums(), tuple(gradient.shape)
    sums.add(gradient.contiguous(), Region((0,) * len(shape), shape, shape))
    return sums.record(shape)


def of(*gradients: torch.Tensor) -> dict[str, GradientRecord]:
    return {str(index): whole(gradient) for index, gradient in enumerate(gradients)}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("shape", [(70_001,), (7, 300, 40), (3, 1)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_sums_of_pieces_are_those_of_the_whole(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    gradient = torch.randn(shape).to(dtype)
    sums, dim = GradientSums(), min(dim, len(shape) - 1)
    first = 0
    for piece in gradient.chunk(3, dim):
        offset = [0] * len(shape)
        offset[dim] = first
        sums.add(piece.contiguous(), Region(tuple(offset), tuple(piece.shape), shape))
        first += piece.shape[dim]
    found, wanted = sums.record(shape), whole(gradient)
    assert (found.sha256, found.digested) == (wanted.sha256, gradient.numel())
    assert found.norm == pytest.approx(wanted.norm)
    assert found.projected == pytest.approx(wanted.projected)


def test_sparse_gradient_is_digested_as_the_dense_one() -> None:
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Embedding(5, 3, sparse=sparse)
        model(torch.tensor([1, 4, 1])).sum().backward()
        context: Any = SimpleNamespace(model=model, placement=Placement())
        digests = GradientDigests(context, {"weight": (5, 3)})
        digests.add_rest()
        found.append(digests.records(torch.device("cpu")))
    assert found[0] == found[1]


def test_difference_refuses_gradient_with_missing_piece() -> None:
    sums, gradient = GradientSums(), torch.randn(6, 5)
    sums.add(gradient[:3], Region((0, 0), (3, 5), (6, 5)))
    with pytest.raises(ValueError, match="15 numbers of 30"):
        largest_difference({"0": sums.record((6, 5))}, of(gradient))


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
