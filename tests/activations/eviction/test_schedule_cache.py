"""Online decisions become a schedule after equal runs: same bits and replays, and online again if a call
differs.
"""

from __future__ import annotations

import io
import warnings
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training_runs import same, trained_values
from support.zoo_paths import ZOO
from torch import Tensor, nn

from memtune.activations.eviction.evicting_region import OnlineRegion, OnlineSettings
from memtune.activations.eviction.op_metadata import Costs
from memtune.activations.eviction.policy import DTR
from memtune.errors import ApplyError
from memtune.testing.training import build

CPU = torch.device("cpu")


def online(model: nn.Module, optimizer: Any, budget_bytes: int, freeze_after: int) -> OnlineRegion:
    policy = replace(DTR, in_place=True, forget=True)
    region = OnlineRegion(
        model,
        optimizer,
        OnlineSettings(policy, budget_bytes, Costs(1e11, 1e10, 1e-6), freeze_after=freeze_after),
        CPU,
    )
    region.install()
    return region


def train(
    path: Path, budget_bytes: int, freeze_after: int, steps: int, micro_batches: int
) -> tuple[list[Tensor], OnlineRegion]:
    workload, model, optimizer = build(path)
    region = online(model, optimizer, budget_bytes, freeze_after)
    return trained_values(workload, model, optimizer, 8, steps, micro_batches), region


@pytest.mark.parametrize(
    ("name", "micro_batches", "percent"),
    [
        ("gpt", 1, 85),
        pytest.param("cnn_bn", 2, 85, marks=pytest.mark.slow),
        ("inplace_views", 1, 85),
        ("autocast", 1, 95),
    ],
)
def test_schedule_repeats_online_decisions_bitwise(name: str, micro_batches: int, percent: int) -> None:
    plain, free = train(ZOO[name], 1 << 40, 0, 5, micro_batches)
    got, region = train(ZOO[name], free.runs.peak_bytes * percent // 100, 2, 5, micro_batches)
    assert same(got, plain)
    assert region.runs.replays > 0
    # each case is counted separately: no optimizer state yet (the first step), and with or without gradients
    assert (region.runs.steps, region.frozen_steps) == (3 * micro_batches, 2 * micro_batches), (
        region.why_online
    )
    case = next(iter(each for each in region.schedule_cache.cases.values() if each.frozen is not None))
    assert case.frozen is not None
    assert case.decided is not None
    order = case.frozen.schedule.computes()
    assert len(order) - len(set(order)) == len(case.decided.replays) > 0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)))
        )
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) * self.scale
        return y.square().mean()


def warmed(freeze_after: int = 2) -> tuple[Net, OnlineRegion, Tensor]:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(64, 32)
    region = online(net, torch.optim.SGD(net.parameters()), 1 << 30, freeze_after)
    for _ in range(3):
        net(x).backward()
        net.zero_grad(set_to_none=True)
    return net, region, x


def test_difference_ends_the_schedule_with_one_warning() -> None:
    net, region, x = warmed()
    assert (region.runs.steps, region.frozen_steps) == (2, 1)
    net.scale = 2.0
    with pytest.warns(UserWarning, match="decides evictions .*scale is 2.0, was 1.0"):
        loss = net(x)
    loss.backward()
    other = Net()
    other.load_state_dict(net.state_dict())
    other.scale = 2.0
    other(x).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), other.parameters(), strict=True))  # type: ignore[arg-type]
    assert (region.runs.steps, region.frozen_steps) == (3, 1)
    net.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x).backward()
    assert region.why_online == "scale is 2.0, was 1.0"


def test_shapes_are_counted_separately() -> None:
    net, region, x = warmed()
    net(x[:48]).backward()
    assert (region.runs.steps, region.frozen_steps) == (3, 1)
    net.zero_grad(set_to_none=True)
    net(x).backward()
    assert (region.runs.steps, region.frozen_steps) == (3, 2)


def test_second_forward_before_backward_ends_the_schedule() -> None:
    net, region, x = warmed()
    first = net(x)
    assert region.frozen_steps == 2
    with pytest.warns(UserWarning, match="a forward begins before the backward"):
        second = net(x * 2)
    (first + second).backward()
    assert (region.runs.steps, region.frozen_steps) == (3, 2)
    got = [p.grad for p in net.parameters()]
    torch.manual_seed(0)
    plain = Net()
    (plain(x) + plain(x * 2)).backward()
    assert same_gradients(got, [p.grad for p in plain.parameters()])


def small(freeze_after: int) -> tuple[Net, OnlineRegion]:
    torch.manual_seed(0)
    net = Net()
    return net, online(net, torch.optim.SGD(net.parameters()), 1 << 30, freeze_after)


def test_values_of_a_waiting_schedule_are_counted_until_it_is_abandoned() -> None:
    net, region, x = warmed()
    out = net(x)
    assert region.schedule_cache.waiting_bytes() > 0
    del out
    assert region.schedule_cache.waiting_bytes() == 0
    net(x).backward()
    assert (region.runs.steps, region.frozen_steps) == (2, 3)


def test_values_of_a_waiting_schedule_leave_less_for_the_next_forward() -> None:
    net, region, x = warmed()
    region.settings = replace(region.settings, budget_bytes=region.runs.peak_bytes * 3 // 4)
    waits = net(x)
    with (
        pytest.warns(UserWarning, match="a forward begins before the backward"),
        pytest.raises(ApplyError, match=r"MT337(.|\n)*or call backward\(\) before the next forward"),
    ):
        net(x)
    waits.backward()
    assert region.runs.steps == 2


def test_copied_model_starts_without_schedules() -> None:
    net, region = small(1)
    x = torch.randn(64, 32)
    for _ in range(2):
        net(x).backward()
        net.zero_grad(set_to_none=True)
    stored = io.BytesIO()
    torch.save(net, stored)
    stored.seek(0)
    for copied in (deepcopy(net), torch.load(stored, weights_only=False)):
        own = copied.forward.__self__
        assert own is not region
        assert own.module is copied
        for _ in range(2):
            copied(x).backward()
            copied.zero_grad(set_to_none=True)
        assert (own.runs.steps, own.frozen_steps) == (1, 1)
    assert deepcopy(net).forward.__self__._optimizer is region._optimizer
    assert region.runs.steps == 1


def test_freeze_after_zero_and_data_dependence_remain_online() -> None:
    _, region, _ = warmed(0)
    assert (region.runs.steps, region.frozen_steps) == (3, 0)

    class Looks(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() < 1e9 else x.sum()

    net = Looks()
    region = online(net, torch.optim.SGD(net.parameters()), 1 << 30, 2)
    for _ in range(4):
        net(torch.ones(4, 32)).backward()
        net.zero_grad(set_to_none=True)
    assert (region.runs.steps, region.frozen_steps) == (4, 0)
    assert "data" in region.why_online


class Outputs(nn.Module):
    """Returns the loss's sources; `order` names the outputs."""

    def __init__(self, *order: str) -> None:
        super().__init__()
        self.one, self.two, self.order = nn.Linear(16, 32), nn.Linear(32, 8), order

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.one(x))
        found = {"logits": self.two(hidden), "aux": hidden.square().mean()}
        return {name: found[name] for name in self.order}


def outputs_trained(
    uses: list[str], order: tuple[str, ...], freeze_after: int | None
) -> tuple[list[Tensor | None], Any]:
    torch.manual_seed(0)
    net, x, region, found = Outputs(*order), torch.randn(64, 16), None, list[Tensor | None]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if freeze_after is not None:
        region = online(net, optimizer, 1 << 30, freeze_after)
    for use in uses:
        out = net(x)
        torch.stack([out[name].square().mean() for name in use.split()]).sum().backward()
        found += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found, region


def same_gradients(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        p is q if p is None or q is None else torch.equal(p, q) for p, q in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("freeze_after", [1, 3])
def test_extra_scalar_output_does_not_end_the_schedule(freeze_after: int) -> None:
    uses = ["logits aux"] * 7
    plain, _ = outputs_trained(uses, ("logits", "aux"), None)
    got, region = outputs_trained(uses, ("logits", "aux"), freeze_after)
    assert same_gradients(got, plain)
    assert region.frozen_steps == 7 - freeze_after, region.why_online


def test_model_with_its_own_loss_may_get_other_gradients_later_unless_a_schedule_runs() -> None:
    uses = ["aux"] * 4 + ["logits"] * 2 + ["logits aux"] * 2 + ["aux"]
    plain, _ = outputs_trained(uses, ("logits", "aux"), None)
    got, region = outputs_trained(uses, ("logits", "aux"), 0)
    assert same_gradients(got, plain)
    assert region.frozen_steps == 0
    with pytest.raises(ApplyError, match="Output 0 of the model gets a gradient"):
        outputs_trained(uses, ("logits", "aux"), 1)


def test_outputs_without_a_gradient_remain_online() -> None:
    uses = ["logits"] * 4 + ["logits aux"] * 2
    plain, _ = outputs_trained(uses, ("logits", "aux"), None)
    got, region = outputs_trained(uses, ("logits", "aux"), 2)
    assert same_gradients(got, plain)
    assert region.frozen_steps == 0
    assert "one of its outputs got no gradient" in region.why_online


class Remembers(Net):
    """Fills attributes that it finds empty."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.always = always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or not self.sizes:
            self.sizes.append(len(x))
        return super().forward(x)


@pytest.mark.parametrize("always", [False, True])
def test_occasional_side_effect_is_captured_in_the_next_call(always: bool) -> None:
    net, x = Remembers(always=always), torch.randn(8, 32)
    region = online(net, torch.optim.SGD(net.parameters()), 1 << 30, 2)
    counts = []
    for step in range(6):
        if step == 2 and not always:
            net.sizes.clear()
        net(x).backward()
        net.zero_grad(set_to_none=True)
        counts.append(len(net.sizes))
    assert counts == ([*range(1, 7)] if always else [1] * 6)
    assert region.frozen_steps == (0 if always else 3), region.why_online
    assert ("sets the attribute sizes" in region.why_online) is always
