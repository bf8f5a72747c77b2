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
