"""Ranks whose batches take other branches average the same parameters with each other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from torch import Tensor, nn

from memtune.activations.recompute.activation_table import ActivationTable
from memtune.errors import ApplyError
from memtune.parallel.model.tensor_parallel import Average
from memtune.parallel.replicas.grad_buckets import Buckets
from memtune.runtime.context import Context

CPU = torch.device("cpu")


class Branches(nn.Module):
    """Expert `used` of two, whose weights have one shape; a rank may use both."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        for index in used:
            x = self.experts[index](x)
        return x.sum()


def branches(steps: list[list[list[int]]], in_buckets: bool) -> list[list[list[float] | None]]:
    """Return each expert's gradient after each step, averaged in buckets or one by one."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, found = Branches(), []
    context = Context(model, torch.optim.SGD(model.parameters()), [], CPU, ActivationTable(model, []))
    if in_buckets:
        Buckets(context, bucket_cap_mb=0, find_unused_parameters=True)
    sync = (
        context.loop.sync
        or Average(context, dist.distributed_c10d._get_default_group(), list(model.parameters())).sync
    )
    for used in steps:
        model.zero_grad()
        with sync(True):
            model(torch.full((1, 2), rank + 1.0), used[rank]).backward()
        found.append([None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()])
    return found


def alone(steps: list[list[list[int]]]) -> list[list[list[float] | None]]:
    """The averages by hand."""
    torch.manual_seed(0)
    model, found = Branches(), []
    for used in steps:
        sums: list[Tensor | None] = [None] * 3
        for rank in range(2):
            model.zero_grad()
            model(torch.full((1, 2), rank + 1.0), used[rank]).backward()
            for index, parameter in enumerate(model.parameters()):
                if parameter.grad is not None:
                    before = sums[index]
                    sums[index] = parameter.grad / 2 if before is None else before + parameter.grad / 2
        found.append([None if each is None else each.flatten().tolist() for each in sums])
    return found


def both(steps: list[list[list[int]]]) -> list[list[list[list[float] | None]]]:
    return [branches(steps, in_buckets) for in_buckets in (True, False)]


def test_grad_buckets_with_different_branches_on_ranks() -> None:
    steps = [[[0], [1]], [[0], [1]], [[0, 1], [0]], [[1], [0, 1]], [[1, 0], [0, 1]], [[2], [2]]]
    wanted = alone(steps)
    for found in (found for ways in run_ranks(both, 2, steps) for found in ways):
        for here, there in zip(found, wanted, strict=True):
            assert [each is None for each in here] == [each is None for each in there]
            for one, other in zip(here, there, strict=True):
                assert one is None or other is None or one == pytest.approx(other, rel=1e-6)


def failing() -> list[str]:
    model = Branches()
    context = Context(model, torch.optim.SGD(model.parameters()), [], CPU, ActivationTable(model, []))
    Buckets(context, bucket_cap_mb=0, find_unused_parameters=False)
    assert context.loop.sync is not None
    said = []
    for used in ([0, 1, 2], [0]):
        model.zero_grad()
        try:
            with context.loop.sync(True):
                model(torch.ones(1, 2), used).backward()
        except ApplyError as error:
            said.append(error.code)
    with context.loop.sync(True):  # goes on as if nothing had been
        model(torch.ones(1, 2), [0, 1, 2]).backward()
    return [*said, str(all(p.grad is not None for p in model.parameters()))]


def test_grad_buckets_are_clean_after_failed_backward() -> None:
    assert run_ranks(failing, 2) == [["MT346", "True"]] * 2
