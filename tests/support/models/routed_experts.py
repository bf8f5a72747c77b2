"""A small model with experts, for runs that end in the middle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

STATES: dict[str, Any] = {"kind": "moesys", "cache": 2, "on_device": 1, "read_prefetch": 1}


class Routed(nn.Module):
    """Rows go to one of three experts, by their sign; most steps use only some experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.rest = nn.Sequential(nn.BatchNorm1d(6), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        to, mixed = (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (mine,) = torch.nonzero(to == index, as_tuple=True)
            mixed = mixed.index_add(0, mine, expert(x[mine]))
        return x + self.rest(mixed)


def routed() -> nn.Module:
    """Return two blocks of experts; `torch.randn(2, 6)` is a batch."""
    torch.manual_seed(1)
    return nn.Sequential(Routed(), Routed(), nn.Linear(6, 2))
