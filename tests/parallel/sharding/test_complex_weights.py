"""Complex weights: torch's Adam does not update their shards; they are refused, or updated on the host."""

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
        return torch.fft.irfft(torch.fft.rfft(x) * self.response, n=8)


@pytest.mark.parametrize("kind", ["zero1", "zero2", "fsdp"])
def test_shards_of_complex_weights_are_updated_on_the_host_or_refused(kind: str) -> None:
    with fake_ranks(2):
        for states in ({}, {"offload": {"states": {"kind": "optimizer_cpu"}}}):
            model = Filter()
            settings: dict[str, Any] = {"sharding": {"states": {"kind": kind}}, **states}
            optimizer = torch.optim.AdamW(model.parameters())
            if states:
                apply(model, optimizer, {"settings": settings}, strict=False)
                continue
            with pytest.raises(
                ApplyError, match=rf"{kind} does not work with complex weights such as response"
            ):
                apply(model, optimizer, {"settings": settings}, strict=False)
