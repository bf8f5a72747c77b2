"""One op against the same op of a partitioned step: which dimensions may be divided."""

from __future__ import annotations

from typing import Any

import pytest

from memtune.autotune.record_parallel.op_check import partition_error


def tensor(*shape: int) -> dict[str, Any]:
    """Return a tensor as signatures describe it."""
    return {"t": ["torch.float32", list(shape)]}


@pytest.mark.parametrize(
    ("name", "whole", "part", "error"),
    [
        ("aten.gelu.default", [tensor(4, 8)], [tensor(4, 4)], ""),
        ("aten.mm.default", [tensor(4, 8), tensor(8, 6)], [tensor(4, 8), tensor(8, 3)], ""),
        ("aten.mm.default", [tensor(4, 8), tensor(8, 6)], [tensor(4, 4), tensor(4, 6)], "sums over"),
        ("aten._softmax.default", [tensor(4, 8), 0, False], [tensor(4, 4), 0, False], ""),
        ("aten._softmax.default", [tensor(4, 8), -1, False], [tensor(4, 4), -1, False], "works along"),
        ("aten.native_layer_norm.default", [tensor(4, 8), [8]], [tensor(2, 8), [8]], ""),
        ("aten.native_layer_norm.default", [tensor(4, 8), [8]], [tensor(4, 4), [8]], "works along"),
        ("aten.cumsum.default", [tensor(4, 8), 0], [tensor(4, 4), 0], "is not known"),
        ("aten.gelu.default", [tensor(4, 8)], [tensor(2, 4)], "in place of"),
        ("aten.mul.Scalar", [tensor(4, 8), 0.5], [tensor(4, 4), 0.25], "another number"),
    ],
)
def test_partition_error_names_ops_that_work_along_the_divided_dimension(
    name: str, whole: list[Any], part: list[Any], error: str
) -> None:
    found = partition_error(name, whole, part, 2)
    assert found == "" if not error else error in found
