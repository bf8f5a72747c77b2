"""Structure of block outputs as text, and outputs recreated around another tensor."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from memtune.workload.output_structure import (
    LONE,
    not_one_tensor,
    require_structures,
    structure_of,
    the_tensor,
    wrap_tensor,
)

X, Y = torch.ones(2), torch.ones(3)
Pair = namedtuple("Pair", "x y")  # a class that JSON would take for a tuple


@pytest.mark.parametrize(
    "output",
    [X, (X,), (X, None), [X, (True, "a")], {"x": X, "dict": {"tensor": X}, "other": None}, (X, [X])],
    ids=structure_of,
)
def test_wrap_tensor_replaces_one_tensor_among_constants(output: Any) -> None:
    form = structure_of(output)
    assert not not_one_tensor(form)
    assert the_tensor(output) is X
    made = wrap_tensor(form, Y)
    assert structure_of(made) == form
    assert the_tensor(made) is Y
    require_structures((form,), 1)


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ((X, Y), "2 tensors"),
        ((None,), "0 tensors"),
        ((X, 2), "an object of int"),
        (Pair(X, None), "an object of Pair"),
    ],
)
def test_not_one_tensor_names_other_outputs(output: Any, reason: str) -> None:
    assert not_one_tensor(structure_of(output)) == reason


@pytest.mark.parametrize(
    "found",
    [(LONE,), (LONE, "["), (LONE, '{"tuple": {}}'), (LONE, '{"a": 1}'), (LONE, "[1]"), (LONE, "[" * 10**5)],
)
def test_require_structures_rejects_damaged_plans(found: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"block|form|Expecting"):
        require_structures(found, 2)
