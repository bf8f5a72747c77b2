"""Fake ops under `OneFakeMode` have the outputs of torch's mode, whatever was cached before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memtune.deferred_init.construction import OneFakeMode

OPS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x + 1,
    lambda x: x + 1.0,
    lambda x: x + True,
    lambda x: x.t() + 1,
    lambda x: x[1:] * 2,
    lambda x: torch.cat([x, x]),
    lambda x: torch.cat([x, x.double()]),
    lambda x: torch.cat([x, x, x]),
    lambda x: x.to(torch.bfloat16),
    lambda x: torch.sum(x, 0),
    lambda x: torch.sum(x, 1, keepdim=True),
    lambda x: x.expand(2, 3, 4).contiguous(),
    lambda x: x.detach().requires_grad_(x.dtype.is_floating_point).clone(),
    lambda x: x.add_(1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_one_fake_mode_gives_outputs_of_torchs_mode(dtype: torch.dtype) -> None:
    found = []
    for mode in (FakeTensorMode(), OneFakeMode()):
        with mode:
            # Twice: the second time from the cache.
            outs = [op(torch.empty(3, 4, dtype=dtype)) for _ in range(2) for op in OPS]
        found.append(
            [
                (
                    x.shape,
                    x.stride(),
                    x.dtype,
                    x.storage_offset(),
                    x.untyped_storage().nbytes(),
                    x.requires_grad,
                )
                for x in outs
            ]
        )
    assert found[0] == found[1]


def test_one_fake_mode_makes_its_own_keys_of_cached_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = []
    plain = fake_tensor.extract_tensor_metadata

    def counted(tensor: Tensor) -> object:
        slow.append(tensor)
        return plain(tensor)

    monkeypatch.setattr(fake_tensor, "extract_tensor_metadata", counted)
    with OneFakeMode():
        x = torch.empty(3, 4)
        for _ in range(3):
            torch.cat([x + 1, x]).sum()
    assert len(slow) <= 3  # outputs of the first round, which torch describes once to cache them
