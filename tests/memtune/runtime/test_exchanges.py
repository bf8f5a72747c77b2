"""A collective that only several ranks run is found in the first run of what would run again, before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import Tensor, nn

from memtune import apply
from memtune.errors import ApplyError

REFUSED = ("full", "every_nth", "selective")


class Block(nn.Module):
    """No recording on one rank sees what this does on two."""

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
    """On a rank: the error's code and text, and the gradients of one step."""
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


def test_refused_by_name_on_two_ranks_and_left_alone_where_nothing_runs_again() -> None:
    for plain, none, *refused in run_ranks(trained_all, 2, ("plain", "none", *REFUSED)):
        assert all(torch.equal(one, other) for one, other in zip(none[2], plain[2], strict=True))
        assert len(plain[2]) == 12
        for code, text, gradients in refused:
            assert (code, gradients) == ("MT306", [])
            assert "c10d.allreduce_.default runs inside 0" in text


@pytest.mark.parametrize("kind", REFUSED)
def test_on_one_rank_it_is_an_op_like_any_other(kind: str) -> None:
    (plain,), (got,) = trained_all(("plain",)), trained_all((kind,))
    assert got[0] == ""
    assert all(torch.equal(one, other) for one, other in zip(got[2], plain[2], strict=True))
