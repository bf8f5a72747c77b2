"""FLOPs of calls that torch's own formulas miscount."""

from __future__ import annotations

import pytest
import torch

from memtune.hardware import flops


@pytest.mark.parametrize("groups", [1, 8])
def test_backward_of_a_convolution_takes_two_forwards_in_groups_too(groups: int) -> None:
    image, weight = torch.empty(2, 8, 16, 16), torch.empty(8, 8 // groups, 3, 3)
    shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    out = torch.empty(2, 8, 16, 16)
    forward = flops.count(torch.ops.aten.convolution.default, (image, weight, None, *shape), {}, out)
    arguments = (out, image, weight, None, *shape, [True, True, False])
    backward = flops.count(torch.ops.aten.convolution_backward.default, arguments, {}, (image, weight, None))
    assert forward == 2 * out.numel() * 8 // groups * 9
    assert backward == 2 * forward


def test_products_in_groups_count_each_row_once() -> None:
    rows, offsets = torch.empty(24, 16), torch.tensor([8, 16, 24], dtype=torch.int32)
    product = torch.ops.aten._grouped_mm.default
    forward = flops.count(product, (rows, torch.empty(3, 16, 8), offsets), {}, torch.empty(24, 8))
    of_weights = flops.count(product, (rows.t(), torch.empty(24, 8), offsets), {}, torch.empty(3, 16, 8))
    assert forward == of_weights == 2 * 24 * 16 * 8
    assert (
        flops.count(product, (torch.empty(3, 4, 16), torch.empty(3, 16, 8)), {}, None) == 2 * 3 * 4 * 16 * 8
    )
