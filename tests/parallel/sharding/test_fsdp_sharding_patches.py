"""Ranks whose samples go to other experts train as one rank with all samples, where FSDP2 reduces a block in
one message.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import memtune
from memtune.errors import ApplyError

STEPS, EXPERTS = 4, 4


class Routed(nn.Module):
    """A row goes to one expert, by the sign of two of its values; the others do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        to, mixed = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long(), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (mine,) = torch.nonzero(to == index, as_tuple=True)
            if len(mine):
                mixed = mixed.index_add(0, mine, expert(x[mine]))
        return x + mixed


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Decay moves what has a gradient, be it zero, and nothing else."""
    torch.manual_seed(1)
    model = nn.Sequential(Routed(), Routed(), nn.Linear(6, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    mean: Tensor = model(x).pow(2).mean()
    return mean


def row(step: int, rank: int) -> Tensor:
    return torch.randn(1, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(states: dict[str, Any], micro_batches: int) -> dict[str, Tensor]:
    """Whole weights after the steps, from rows that each rank has of its own."""
    model, optimizer = fresh()
    tuned = memtune.apply(
        model, optimizer, {"settings": {"sharding": {"states": states}}}, loss=loss, strict=False
    )
    for step in range(STEPS):
        tuned.step([row(step, micro_batches * dist.get_rank() + i) for i in range(micro_batches)])
    return {
        name: p.full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }


def alone(rows: int) -> dict[str, Tensor]:
    """The same from all rows on one rank; as many experts as there are go without a gradient in some step."""
    model, optimizer = fresh()
    unused = 0
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(rows):
            (loss(model, row(step, i)) / rows).backward()  # type: ignore[no-untyped-call]
        unused += sum(p.grad is None for p in model.parameters())
        optimizer.step()
    assert unused > 0 or rows > 4
    return {name: p.detach() for name, p in model.named_parameters()}


class Branches(nn.Module):
    """One of two layers of one shape runs, as the samples say."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.high(x) if x[0, 0] > 0 else self.low(x)
        return out


def branched(others_from: int) -> list[Any]:
    """At which step this rank says what, where ranks use other branches from a step on; and whether that step
    updated.
    """
    torch.manual_seed(1)
    model, rank = nn.Sequential(Branches(), Branches()), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuned = memtune.apply(
        model, optimizer, {"settings": {"sharding": {"states": {"kind": "fsdp"}}}}, loss=loss, strict=False
    )
    for step in range(1, 9):
        before = [p.to_local().clone() for p in optimizer.param_groups[0]["params"]]
        try:
            tuned.step([torch.ones(1, 6) * (-1 if rank and step >= others_from else 1)])
        except ApplyError as error:
            after = [p.to_local() for p in optimizer.param_groups[0]["params"]]
            return [step, error.code, all(torch.equal(*pair) for pair in zip(before, after, strict=True))]
    return []


@pytest.mark.slow
@pytest.mark.parametrize(("others_from", "noticed_at"), [(1, 1), (3, 4)])
def test_fsdp_different_branches_on_ranks_raise(others_from: int, noticed_at: int) -> None:
    assert run_ranks(branched, 2, others_from) == [[noticed_at, "MT346", True]] * 2


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "states"),
    [
        (2, 1, {"kind": "fsdp"}),
        pytest.param(2, 2, {"kind": "fsdp", "reshard_after_forward": False}, marks=pytest.mark.slow),
        pytest.param(4, 2, {"kind": "mics", "group": 2}, marks=pytest.mark.slow),
        pytest.param(4, 1, {"kind": "paro", "group": 2}, marks=pytest.mark.slow),
        pytest.param(4, 1, {"kind": "fsdp", "degree": 2}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"kind": "zero1"}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"kind": "zero2"}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"kind": "ddp", "find_unused_parameters": True}, marks=pytest.mark.slow),
        pytest.param(
            4, 2, {"kind": "amsp", "parameters": 1, "gradients": 2, "optimizer": 4}, marks=pytest.mark.slow
        ),
        pytest.param(
            4, 3, {"kind": "amsp", "parameters": 2, "gradients": 2, "optimizer": 4}, marks=pytest.mark.slow
        ),
        pytest.param(
            4, 2, {"kind": "amsp", "parameters": 1, "gradients": 1, "optimizer": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_fsdp_reduces_experts_used_on_some_ranks(
    ranks: int, micro_batches: int, states: dict[str, Any]
) -> None:
    wanted = alone(ranks * micro_batches)
    for found in run_ranks(trained, ranks, states, micro_batches):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
