"""A second run repeats the draws of the first, also from the user's own generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.training_runs import same
from torch import Generator, Tensor, nn

from memtune.activations.eviction.evicting_region import OnlineRegion, OnlineSettings
from memtune.activations.eviction.op_metadata import Costs
from memtune.activations.eviction.policy import DTR
from memtune.activations.recompute.activation_table import ActivationTable
from memtune.activations.recompute.rng_state_pass import STATE_BYTES
from memtune.memory.ledger import Ledger
from memtune.runtime.memory_tiers import HOST
from memtune.runtime.rng_state import seed_generators

GLOBAL_GENERATOR = Generator()


class Block(nn.Module):
    """Draws from a generator that is an attribute, or from one that no module has."""

    def __init__(self, is_mine: bool, begins: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.mine, self.begins, self.runs = Generator() if is_mine else None, begins, 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        if self.begins == 0 or int(x.new_tensor(self.begins)) <= STEP[0]:
            y = y * torch.empty_like(y).bernoulli_(0.7, generator=self.mine or GLOBAL_GENERATOR)
        y = nn.functional.dropout(torch.sigmoid(y), 0.2)
        return x + self.down(y)


STEP = [0]


def gradients(
    install: Callable[[nn.Module], Any], is_mine: bool, begins: int = 0
) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    GLOBAL_GENERATOR.manual_seed(1)
    net = nn.Sequential(*(Block(is_mine, begins) for _ in range(3)))
    for each in net:
        if each.mine is not None:
            each.mine.manual_seed(2)
    installed, found = install(net), []
    for STEP[0] in range(3):
        net(torch.randn(32, 16)).square().sum().backward()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
    return found, installed


def blocks(keep: Callable[[Any], bool] | None) -> Callable[[nn.Module], Any]:
    def install(net: nn.Module) -> ActivationTable:
        table = ActivationTable(net, [name for name, _ in net.named_children()])
        for index in range(3):
            table.claim_recompute(index, keep)
        table.install()
        return table

    return install


def online(budget_bytes: int) -> Callable[[nn.Module], OnlineRegion]:
    def install(net: nn.Module) -> OnlineRegion:
        settings = OnlineSettings(
            replace(DTR, in_place=True, forget=True), budget_bytes, Costs(1e11, 1e10, 1e-6)
        )
        region = OnlineRegion(net, torch.optim.SGD(net.parameters()), settings, torch.device("cpu"))
        region.install()
        return region

    return install


@pytest.mark.parametrize("is_mine", [True, False])
@pytest.mark.parametrize("keep", [None, lambda func: "bernoulli" in str(func) or "addmm" in str(func)])
def test_second_run_draws_from_the_users_generators(
    keep: Callable[[Any], bool] | None, is_mine: bool
) -> None:
    plain, _ = gradients(lambda net: None, is_mine)
    got, table = gradients(blocks(keep), is_mine)
    assert len(table.traffic.recomputed_regions) == 3
    assert same(got, plain)


@pytest.mark.parametrize("is_mine", [True, False])
def test_generators_may_be_first_used_in_a_later_run(is_mine: bool) -> None:
    plain, _ = gradients(lambda net: None, is_mine, begins=1)
    assert same(gradients(blocks(None), is_mine, begins=1)[0], plain)


@pytest.mark.parametrize("is_mine", [True, False])
def test_blocks_that_draw_from_a_later_run_on_repeat_their_draws(is_mine: bool) -> None:
    """No state was kept of their first run, which drew nothing."""

    def gradients(recompute: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(*(Drops(is_mine) for _ in range(3)))
        table = blocks(None)(net) if recompute else None
        found = []
        for step in range(3):
            net.train(step > 0)
            net(torch.randn(32, 16)).square().sum().backward()
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        assert table is None or all(region.contract.draws for region in table.regions)
        return found

    assert same(gradients(True), gradients(False))


OF_FILE = random.Random()


@pytest.mark.parametrize(
    "mine",
    [
        *(lambda: random.Random(3), lambda: np.random.default_rng(3), lambda: np.random.RandomState(3)),
        lambda: None,
    ],
)
def test_blocks_repeat_draws_from_their_generators_of_python_and_numpy(mine: Callable[[], Any]) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.mine = nn.Linear(16, 16), mine()

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.up(x * (1 + 0.01 * (self.mine or OF_FILE).random())))

    def gradients(recompute: bool) -> list[Tensor]:
        torch.manual_seed(0)
        OF_FILE.seed(3)
        net = nn.Sequential(*(Scales() for _ in range(3)))
        if recompute:
            blocks(None)(net)
        found = []
        for _ in range(2):
            net(torch.ones(4, 16)).square().sum().backward()
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        return found

    assert same(gradients(True), gradients(False))


class Drops(nn.Module):
    """Draws in training mode: from a generator of its own, or torch's."""

    def __init__(self, is_mine: bool) -> None:
        super().__init__()
        self.up, self.mine = nn.Linear(16, 16), Generator().manual_seed(1) if is_mine else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        if self.training:
            y = y * torch.empty_like(y).bernoulli_(0.7, generator=self.mine)
        return x + torch.sigmoid(y)


@pytest.mark.native_ledger
@pytest.mark.parametrize("training", [True, False])
def test_block_without_draws_keeps_no_state(training: bool) -> None:
    ledger, net = Ledger.open("cpu"), nn.Sequential(*(Drops(False) for _ in range(3))).train(training)
    blocks(None)(net)
    net(torch.randn(32, 16)).sum().backward()
    before = ledger.live_bytes(HOST)
    loss = net(torch.randn(32, 16)).sum()
    assert ledger.live_bytes(HOST) - before == (3 * STATE_BYTES if training else 0)
    loss.backward()
    del loss
    assert ledger.live_bytes(HOST) == before


@pytest.mark.parametrize("is_mine", [True, False])
def test_online_eviction_repeats_draws_of_single_ops(is_mine: bool) -> None:
    plain, free = gradients(online(1 << 40), is_mine)
    got, region = gradients(online(free.runs.peak_bytes * 95 // 100), is_mine)
    assert region.runs.replays > 0
    assert same(got, plain)


def test_seeding_equals_torch_and_queues_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    wanted = torch.rand(3)
    queued: list[Any] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda *each, **_: queued.append(each))
    seed_generators(7)
    assert torch.equal(torch.rand(3), wanted)
    assert bool(queued) == torch.accelerator.is_available()
