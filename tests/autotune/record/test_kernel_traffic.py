"""Bytes that kernels move, of a table of 1000 rows of 8 floats and 10 rows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memtune.autotune.record.kernel_traffic import kernel_traffic_bytes
from memtune.runtime import tensors_in

TABLE, ROWS, AT = torch.zeros(1000, 8), torch.zeros(10, 8), torch.zeros(10, dtype=torch.long)
ROW_BYTES, AT_BYTES, TABLE_BYTES = 320, 80, 32000


class Traffic(TorchDispatchMode):
    """Sums the bytes of all ops that are no views."""

    n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        in_place = func._schema.is_mutable
        self.n_bytes += kernel_traffic_bytes(
            str(func), tensors_in(args), tensors_in((out,)), in_place=in_place, on_cpu=True
        )
        return out


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: TABLE + TABLE, 3 * TABLE_BYTES),
        (lambda: torch.empty(1000, 8), 0),
        (lambda: torch.zeros_like(TABLE), TABLE_BYTES),
        (lambda: TABLE[AT], 2 * ROW_BYTES + AT_BYTES),
        (lambda: F.embedding(AT, TABLE), 2 * ROW_BYTES + AT_BYTES),
        (lambda: TABLE.clone().index_add_(0, AT, ROWS), 2 * TABLE_BYTES + 3 * ROW_BYTES + AT_BYTES),
        (lambda: TABLE.index_add(0, AT, ROWS), 2 * TABLE_BYTES + ROW_BYTES + AT_BYTES),
        (lambda: F.nll_loss(ROWS, AT % 8), 3 * AT_BYTES + 8),
    ],
)
def test_kernels_move_what_they_touch(call: Callable[[], Any], expected: int) -> None:
    with Traffic() as traffic:
        call()
    assert traffic.n_bytes == expected


def test_second_kernel_of_a_norm_reads_its_inputs_again_on_a_gpu() -> None:
    slope, image, weight, sums = TABLE, torch.zeros_like(TABLE), torch.zeros(8), torch.zeros(1000)

    def passes(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], on_cpu: bool) -> int:
        found = kernel_traffic_bytes(name, inputs, outputs, in_place=False, on_cpu=on_cpu)
        return round(found / TABLE_BYTES)

    backward = [slope, image, sums, weight]
    for name in ("native_layer_norm_backward", "_fused_rms_norm_backward", "native_group_norm_backward"):
        both = (f"aten.{name}.default", backward, [image, weight])
        assert passes(*both, on_cpu=False) == 5
        assert passes(*both, on_cpu=True) == 3
        assert passes(*both[:2], [image], on_cpu=False) == 3  # frozen weights
        assert passes(*both[:2], [weight], on_cpu=False) == 2
    assert passes("aten.native_group_norm.default", [image, weight], [image, sums], on_cpu=False) == 3
    assert passes("aten.native_layer_norm.default", [image, weight], [image, sums], on_cpu=False) == 2
