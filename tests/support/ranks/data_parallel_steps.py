"""Three steps of ranks that each take their share of the samples, compared with one rank that takes them
all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memtune.api import Tuned
from memtune.runtime.transfer import COUNTERS

SAMPLES, DIM, STEPS = 16, 6, 3
Batches = Callable[[int], list[Tensor]]
"""The samples of a step, one by one."""


class TiedNet(nn.Module):
    """A net with a tied head, a frozen layer, seven rows and one row."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, DIM)
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 7), nn.Tanh(), nn.Linear(7, DIM)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(1, DIM))
        self.head = nn.Linear(DIM, 11, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.wte(tokens))
        for block in self.h:
            x = x + block(x)
        out: Tensor = self.head(self.extra(x, tokens) * self.scale)
        return out

    def extra(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Hook for additional computation in subclasses."""
        return x


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with weight decay, which moves parameters with zero gradients but not those without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.2, momentum=0.9, weight_decay=0.01)


def build(kind: type[TiedNet] = TiedNet) -> tuple[TiedNet, torch.optim.Optimizer]:
    """Return a net and its optimizer, the same on every rank."""
    torch.manual_seed(3)
    model = kind()
    return model, optimizer_of(model)


def batches(step: int) -> list[Tensor]:
    """Return the samples of a step, one by one."""
    return list(torch.randint(11, (SAMPLES, 5), generator=torch.Generator().manual_seed(step)).chunk(SAMPLES))


def on_this_rank(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tuned: Tuned,
    batches: Batches,
    parts: int,
    clip: float,
    says_last: bool = True,
) -> dict[str, Any]:
    """Return losses, norms, weights, momenta and bytes sent in a custom loop over `parts` micro-batches.

    `says_last`: the loop marks the last micro-batch.
    """
    sync: Callable[[bool], AbstractContextManager[Any]] = (
        tuned._context.loop.sync if says_last else None
    ) or (lambda last: nullcontext())
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    norms, losses = [], []
    COUNTERS.take()
    for step in range(STEPS):
        mine = torch.cat(batches(step)[rank * SAMPLES // ranks : (rank + 1) * SAMPLES // ranks])
        total = 0.0
        for index, part in enumerate(mine.chunk(parts)):
            with sync(index == parts - 1):
                value = loss(tuned.model, part) / parts
                value.backward()
                total += float(value.detach())
        losses.append(total)
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    counted, state = COUNTERS.take(), tuned.state_dict()
    momenta = _momenta(state["optimizer"])
    return {
        "weights": state["model"],
        "losses": losses,
        "norms": norms,
        "momenta": momenta,
        "counted": counted,
    }


def alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, clip: float
) -> dict[str, Any]:
    """Return the same for one rank that takes all samples."""
    norms, losses = [], []
    for step in range(STEPS):
        each = [loss(model, part) / SAMPLES for part in batches(step)]
        torch.stack(each).sum().backward()
        losses.append(sum(float(value.detach()) for value in each))
        if clip:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "weights": model.state_dict(),
        "losses": losses,
        "norms": norms,
        "momenta": _momenta(optimizer.state_dict()),
    }


def _momenta(state: dict[str, Any]) -> dict[int, Tensor]:
    return {index: each["momentum_buffer"] for index, each in state["state"].items()}


def check(runs: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    """Compare every rank's weights, momenta and norms, and the mean of their losses; weights are bitwise
    equal on all ranks.
    """
    for run in runs:
        for name, weight in wanted["weights"].items():
            assert torch.allclose(run["weights"][name], weight, rtol=0, atol=1e-6), name
        assert run["momenta"].keys() == wanted["momenta"].keys()
        for index, momentum in wanted["momenta"].items():
            assert torch.allclose(run["momenta"][index], momentum, rtol=0, atol=1e-6), index
        assert run["norms"] == pytest.approx(wanted["norms"], rel=1e-6)
    for step, value in enumerate(wanted["losses"]):
        assert sum(run["losses"][step] for run in runs) / len(runs) == pytest.approx(value, rel=1e-6)
    assert all(
        torch.equal(run["weights"][name], runs[0]["weights"][name])
        for run in runs
        for name in runs[0]["weights"]
    )
