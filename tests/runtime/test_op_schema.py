"""Reads and writes of ATen calls, against what the ops do to real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memtune.runtime.op_schema import mutated, tensors_in

aten = torch.ops.aten
ONE, TWO, THREE = torch.ones(2, 3), torch.full((2, 3), 2.0), torch.full((2, 3), 3.0)


def batch_norm(*, training: bool) -> tuple[Any, ...]:
    return torch.randn(4, 3), None, None, torch.zeros(3), torch.ones(3), training, 0.1, 1e-5


def test_tensors_in_reads_nested_lists_in_order() -> None:
    found = tensors_in((ONE, 3, [TWO, None, (THREE,)], "x"))
    assert [id(each) for each in found] == [id(ONE), id(TWO), id(THREE)]
    assert tensors_in([]) == []


@pytest.mark.parametrize(
    ("func", "arguments"),
    [
        (aten.add_.Tensor, lambda: (ONE.clone(), TWO)),
        (aten.add.Tensor, lambda: (ONE.clone(), TWO)),
        (aten._foreach_mul_.Scalar, lambda: ([ONE.clone(), TWO.clone()], 2.0)),
        (aten.addcmul_.default, lambda: (ONE.clone(), TWO.clone(), THREE.clone())),
        (aten.native_batch_norm.default, lambda: batch_norm(training=True)),
        (
            aten.native_batch_norm.default,
            lambda: (torch.randn(4, 3), None, None, torch.zeros(3), torch.ones(3), False, 0.1, 1e-5),
        ),
    ],
)
def test_mutated_names_the_tensors_that_change(func: Any, arguments: Any) -> None:
    args = arguments()
    before = {id(each): each.clone() for each in tensors_in(args)}
    func(*args)
    changed = {id(each) for each in tensors_in(args) if not torch.equal(each, before[id(each)])}
    assert {id(each) for each in mutated(func, args, {})} == changed
