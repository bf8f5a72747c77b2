"""Decided without a dispatch mode: the same decisions as under it, one by one, the same bits and the same bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_runs import same

from memtune.remat import COOP, DTR, MEGTAICHI, Policy
from memtune.runtime.online import OnlineRegion, OnlineSettings
from memtune.runtime.online_values import Again
from memtune.runtime.op_facts import Costs

CPU = torch.device("cpu")
POLICIES = {"dtr": DTR, "coop": COOP, "megtaichi": MEGTAICHI}


def online(model: nn.Module, optimizer: Any, policy: Policy, budget_bytes: int, **more: Any) -> OnlineRegion:
    policy = replace(policy, in_place=True, forget=True, compacts=True)
    settings = OnlineSettings(policy, budget_bytes, Costs(1e11, 1e10, 1e-6), **{"freeze_after": 0, **more})
    region = OnlineRegion(model, optimizer, settings, CPU)
    region.install()
    return region


def noted_decisions(region: OnlineRegion) -> list[list[Again]]:
    """Filled run by run with what ran again, in order."""
    found: list[list[Again]] = []
    note = region.warm_up.note

    def noting(key: Any, decided: Any) -> None:
        assert decided is not None
        found.append(decided.replays)
        note(key, decided)

    region.warm_up.note = noting  # type: ignore[method-assign]
    return found


class Net(nn.Module):
    """Dropout, batch norm, views, an in-place op, a chain by elements, and settings of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.3)
        self.blocks = nn.ModuleList(nn.Linear(32, 64) for _ in range(4))
        self.last, self.power = nn.Linear(32, 8), 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.norm(self.first(x)))
        x = y[:, ::2]
        for block in self.blocks:
            left, right = block(x).relu_().chunk(2, dim=-1)
            x = x + functional.leaky_relu(functional.elu(left), 0.2) * torch.sigmoid(right)
        out: Tensor = self.last(x) ** self.power
        return out


def trained(
    policy: Policy, budget_bytes: int, steps: int = 3, **more: Any
) -> tuple[list[Tensor], OnlineRegion, list[list[Again]]]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    region = online(net, optimizer, policy, budget_bytes, **more)
    decided = noted_decisions(region)
    found = []
    for _ in range(steps):
        loss = net(torch.randn(256, 32)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del loss
    return [*found, *(each.clone() for each in net.buffers()), torch.get_rng_state()], region, decided


@pytest.mark.parametrize("percent", [75, 55])
@pytest.mark.parametrize("name", POLICIES)
def test_decides_as_under_the_mode(name: str, percent: int) -> None:
    policy = POLICIES[name]
    plain, free, _ = trained(policy, 1 << 40, follow=False)
    budget_bytes = free.runs.peak_bytes * percent // 100
    under, mode, decided = trained(policy, budget_bytes, follow=False)
    got, region, again = trained(policy, budget_bytes)
    assert same(got, plain)
    assert same(under, plain)
    assert again == decided
    assert all(decided)
    assert replace(region.runs, followed=0) == mode.runs
    assert (mode.runs.followed, region.runs.followed) == (0, 2), region.followers.why_not
