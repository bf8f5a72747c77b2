"""Complex weights: a view of their shards may be a copy, so plain tensors are updated, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtune.api import apply
from memtune.autotune.record_parallel import fake_ranks
from memtune.errors import ApplyError


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.response = nn.Parameter(torch.ones(5, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.fft.irfft(torch.fft.rfft(x) * self.response, n=8)
        return out


class Own(torch.optim.AdamW):
    """An optimizer that may read more than one element, so it updates DTensors."""


@pytest.mark.parametrize("kind", ["zero1", "zero2", "fsdp"])
def test_complex_shards_are_updated_as_plain_tensors_or_refused(kind: str) -> None:
    settings: dict[str, Any] = {"sharding": {"states": {"kind": kind}}}
    on_host = {"offload": {"states": {"kind": "optimizer_cpu"}}}
    with fake_ranks(2):
        for make, more in ((torch.optim.AdamW, {}), (Own, on_host)):
            model = Filter()
            apply(model, make(model.parameters()), {"settings": settings | more}, strict=False)
        model = Filter()
        with pytest.raises(
            ApplyError, match=rf"{kind} and Own do not work with complex weights \(response\)"
        ):
            apply(model, Own(model.parameters()), {"settings": settings}, strict=False)
