"""What blocks return, as text, and made again around another tensor."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from memtune.block_outputs import LONE, around, form_of, not_one_tensor, outputs_in, the_tensor

X, Y = torch.ones(2), torch.ones(3)
Pair = namedtuple("Pair", "x y")  # a class that JSON would take for a tuple


@pytest.mark.parametrize(
    "output", [X, (X,), (X, None), [X, (True, "a")], {"x": X, "dict": {"tensor": X}, "other": None}, (X, [X])], ids=form_of
)
def test_one_tensor_among_constants_is_replaced(output: Any) -> None:
    form = form_of(output)
    assert not not_one_tensor(form)
    assert the_tensor(output) is X
    made = around(form, Y)
    assert form_of(made) == form
    assert the_tensor(made) is Y
    assert outputs_in([form], 1) == (form,)


@pytest.mark.parametrize(
    ("output", "reason"),
    [((X, Y), "2 tensors"), ((None,), "0 tensors"), ((X, 2), "an object of int"), (Pair(X, None), "an object of Pair")],
)
def test_all_else_is_named(output: Any, reason: str) -> None:
    assert not_one_tensor(form_of(output)) == reason


@pytest.mark.parametrize(
    "found", ["", [LONE], [LONE, 1], [LONE, "["], [LONE, '{"tuple": {}}'], [LONE, '{"a": 1}'], [LONE, "[1]"], [LONE, "[" * 10**5]]
)
def test_damaged_plans_are_told(found: Any) -> None:
    with pytest.raises(ValueError, match=r"block|form|Expecting"):
        outputs_in(found, 2)
