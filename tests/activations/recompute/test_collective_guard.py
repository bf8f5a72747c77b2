"""A collective that only several ranks run raises in the first run of a recomputed block, before any
training.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from memtune import apply
from memtune.errors import ApplyError

REFUSED = ("full", "every_nth", "selective")


class Block(nn.Module):
    """Block whose behaviour on two ranks no recording on one rank shows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.norm(x)).exp()
        scale = y.detach().mean()
        if dist.is_initialized():
            dist.all_reduce(scale)
        return x + y.sin() * scale


def trained(kind: str) -> tuple[str, str, list[Tensor]]:
    """Return on each rank the error's code and text, and the gradients of one step."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters())
    if kind != "plain":
        settings = {"recompute": {"kind": kind}}
        model, optimizer = apply(model, optimizer, {"settings": settings}, strict=False)
    x = torch.randn(4, 8)
    try:
        model(x).sum().backward()
    except ApplyError as error:
        return str(error.code), str(error), []
    return "", "", [p.grad for p in model.parameters()]


def trained_all(kinds: tuple[str, ...]) -> list[tuple[str, str, list[Tensor]]]:
    return [trained(kind) for kind in kinds]


def test_collective_in_a_recomputed_block_raises_on_two_ranks() -> None:
    for plain, none, *refused in run_ranks(trained_all, 2, ("plain", "none", *REFUSED)):
        assert all(torch.equal(one, other) for one, other in zip(none[2], plain[2], strict=True))
        assert len(plain[2]) == 12
        for code, text, gradients in refused:
            assert (code, gradients) == ("MT306", [])
            assert "c10d.allreduce_.default runs inside 0" in text


class Later(nn.Module):
    """Exchanges data from its run `since` on."""

    def __init__(self, since: int) -> None:
        super().__init__()
        self.norm, self.layer, self.runs, self.since = nn.LayerNorm(8), nn.Linear(8, 8), list[None](), since

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(None)
        y = self.layer(self.norm(x)).exp()
        scale = y.detach().mean()
        if len(self.runs) >= self.since:
            dist.all_reduce(scale)
        return x + y.sin() * scale


def trained_later(since: int) -> list[tuple[int, str, str]]:
    """Return on each rank, for each kind, steps before the error, its code and text; outside of blocks
    collectives work.
    """
    found = []
    for kind in REFUSED:
        model: Any = nn.Sequential(*(Later(since) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters())
        model, optimizer = apply(model, optimizer, {"settings": {"recompute": {"kind": kind}}}, strict=False)
        steps = 0
        try:
            for _ in range(3):
                model(torch.randn(4, 8)).sum().backward()
                sums = torch.ones(2)
                work = dist.all_reduce(sums, async_op=True)
                work.wait()
                dist.all_gather([torch.zeros(2), torch.zeros(2)], sums)
                assert sums.tolist() == [2, 2]
                steps += 1
        except ApplyError as error:
            found.append((steps, str(error.code), str(error)))
        dist.barrier()
    return found


def test_collective_of_a_later_run_raises() -> None:
    """Runs 1 and 2 belong to the first step; run 3 is the second step's forward; runs 2 and 4 are second
    runs.
    """
    for since, step in ((3, 1), (4, 1), (2, 0)):
        for found in run_ranks(trained_later, 2, since):
            assert [each[:2] for each in found] == [(step, "MT306")] * len(REFUSED)
            assert all("c10d.allreduce_.default runs inside" in text for _, _, text in found)


FUNCTIONAL = {
    "all_reduce": lambda t: functional.all_reduce(t, "sum", dist.group.WORLD),
    "all_gather_into_tensor": lambda t: functional.all_gather_tensor(t, 0, dist.group.WORLD),
    "reduce_scatter_tensor": lambda t: functional.reduce_scatter_tensor(t, "sum", 0, dist.group.WORLD),
    "all_to_all_single": lambda t: functional.all_to_all_single_autograd(t, None, None, dist.group.WORLD),
    "broadcast": lambda t: functional.broadcast(t, 0, dist.group.WORLD),
}


class LaterFunctional(Later):
    """Like `Later`, with a collective that returns its result, and with a history if `grad`."""

    def __init__(self, since: int, what: str, grad: bool) -> None:
        super().__init__(since)
        self.what, self.grad = what, grad

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(None)
        y = self.layer(self.norm(x)).exp()
        if len(self.runs) >= self.since:
            y = y * FUNCTIONAL[self.what](y if self.grad else y.detach()).mean()
        return x + y.sin()


def trained_functional() -> list[tuple[int, str]]:
    """Return on each rank, for each collective, steps before the error, and its text; then its gradient
    outside of blocks.
    """
    found = []
    for what in FUNCTIONAL:
        for grad in (False, True):
            model: Any = nn.Sequential(*(LaterFunctional(3, what, grad) for _ in range(2)))
            optimizer = torch.optim.SGD(model.parameters())
            model, optimizer = apply(
                model, optimizer, {"settings": {"recompute": {"kind": "full"}}}, strict=False
            )
            steps = 0
            try:
                for _ in range(2):
                    model(torch.randn(4, 8)).sum().backward()
                    steps += 1
            except ApplyError as error:
                found.append((steps, str(error)))
            dist.barrier()
    x = torch.ones(4, requires_grad=True)
    FUNCTIONAL["all_to_all_single"](x * 3).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4
    return found


def test_functional_collective_of_a_later_run_raises() -> None:
    for found in run_ranks(trained_functional, 2):
        assert [steps for steps, _ in found] == [1] * 2 * len(FUNCTIONAL)
        for (_, text), what in zip(found, [each for each in FUNCTIONAL for _ in range(2)], strict=True):
            assert f"{what}{'_' if what == 'broadcast' else ''}.default runs inside 0" in text


@pytest.mark.parametrize("kind", REFUSED)
def test_collective_on_one_rank_is_allowed(kind: str) -> None:
    (plain,), (got,) = trained_all(("plain",)), trained_all((kind,))
    assert got[0] == ""
    assert all(torch.equal(one, other) for one, other in zip(got[2], plain[2], strict=True))
