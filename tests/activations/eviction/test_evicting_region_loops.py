"""Loops with several forwards before a backward, or after others with one each, stay within the budget."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training_runs import same
from torch import Tensor, nn
from torch.nn import functional

from memtune.activations.eviction.evicting_region import OnlineRegion, OnlineSettings
from memtune.activations.eviction.eviction_pass import online_policy
from memtune.activations.eviction.op_metadata import Costs
from memtune.activations.eviction.policy import COOP, DTR, MEGTAICHI, Policy
from memtune.errors import ApplyError
from memtune.memory.ledger import Ledger
from memtune.runtime.memory_tiers import HOST, tier

CPU = torch.device("cpu")
LARGE = 1 << 40
Step = Callable[[nn.Module, Tensor, Tensor], None]


class Judge(nn.Module):
    """Discriminator of real samples; draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        layers = (
            layer for _ in range(3) for layer in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
        )
        self.body, self.drop = nn.Sequential(*layers), nn.Dropout(0.2)
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(self.body(x)))
        return out


def once(net: nn.Module, real: Tensor, fake: Tensor) -> None:
    net(real).square().mean().backward()


def adversarial(net: nn.Module, real: Tensor, fake: Tensor) -> None:
    """Put both judgements in one loss."""
    (functional.softplus(-net(real)) + functional.softplus(net(fake))).mean().backward()


def apart(net: nn.Module, real: Tensor, fake: Tensor) -> None:
    """Run the first backward while the second forward waits for its own."""
    one, other = net(real).square().mean(), net(fake).abs().mean()
    one.backward()
    other.backward()


def contrastive(net: nn.Module, real: Tensor, fake: Tensor) -> None:
    """Use two views of the same samples, with an evaluation in between; samples get gradients, too."""
    real = real.clone().requires_grad_()
    one = net(real)
    with torch.no_grad():
        net(fake)
    (functional.mse_loss(one, net(real * 0.9)) + real.square().mean()).backward()
    assert real.grad is not None
    with tier(HOST):
        net.flowed = real.grad.clone()  # type: ignore[assignment]


def asked(net: nn.Module, real: Tensor, fake: Tensor) -> None:
    """Request gradients as return values (`autograd.grad`)."""
    one, other = net(real).square().mean(), net(fake).square().mean()
    parameters = list(net.parameters())
    for parameter, each in zip(parameters, torch.autograd.grad(one + other, parameters), strict=True):
        parameter.grad = each


def judge(budget_bytes: int | None, policy: Policy = DTR, freeze_after: int = 0) -> tuple[Judge, Any]:
    torch.manual_seed(0)
    net = Judge()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if budget_bytes is None:
        return net, None
    settings = OnlineSettings(
        online_policy(policy), budget_bytes, Costs(1e11, 1e10, 1e-6), 1 << 12, freeze_after=freeze_after
    )
    region = OnlineRegion(net, optimizer, settings, CPU)
    region.install()
    return net, region


def trained(net: nn.Module, steps: list[Step]) -> tuple[list[Tensor], list[int]]:
    """Return the differences between steps, and each step's peak above the background bytes."""
    real, fake = torch.randn(512, 32), torch.randn(512, 32)
    found, peaks = [], []
    gc.collect()
    ledger = Ledger.open("cpu")
    for number, step in enumerate(steps):
        torch.manual_seed(number)
        before_bytes = ledger.live_bytes()
        ledger.reset_peak()
        step(net, real, fake)
        peaks.append(ledger.peak_allocated_bytes() - before_bytes)
        with tier(HOST), torch.no_grad():
            for each in net.parameters():
                assert each.grad is not None
                found.append(each.grad.clone())
                each -= 0.1 * each.grad
            found += [net.flowed] if hasattr(net, "flowed") else []  # type: ignore[list-item]
        net.zero_grad(set_to_none=True)
    return found, peaks


def budget(percent: int) -> tuple[int, int]:
    """Return a budget of `percent` of one forward and backward, and the background bytes."""
    net, region = judge(LARGE)
    trained(net, [once])
    there_bytes = sum(p.nbytes for p in net.parameters()) + 512 * 32 * 4
    return there_bytes + (region.runs.peak_bytes - there_bytes) * percent // 100, there_bytes


needs_ledger = pytest.mark.native_ledger


@needs_ledger
@pytest.mark.parametrize("step", [apart, contrastive], ids=lambda each: each.__name__)
def test_loop_with_two_forwards_stays_within_the_budget(step: Step) -> None:
    loops([once, step, step], DTR, 3, 60)


@needs_ledger
@pytest.mark.filterwarnings("ignore:memtune decides evictions")
def test_loop_changing_to_two_forwards_ends_the_schedule_within_the_budget() -> None:
    """The waiting schedule holds what it saved; the second forward evicts for itself."""
    loops([once, once, adversarial, adversarial, once], DTR, 1, 170)


@needs_ledger
@pytest.mark.slow
@pytest.mark.parametrize("policy", [DTR, COOP, MEGTAICHI], ids=["dtr", "coop", "megtaichi"])
def test_two_forwards_train_from_the_first_step_or_occasionally(policy: Policy) -> None:
    for steps in (
        [apart, adversarial],
        [once, once, apart, once, adversarial, contrastive, asked, once],
    ):
        loops(steps, policy, 0, 75)


def loops(steps: list[Step], policy: Policy, freeze_after: int, percent: int) -> None:
    budget_bytes, there_bytes = budget(percent)
    net, region = judge(budget_bytes, policy, freeze_after)
    found, peaks = trained(net, steps)
    assert same(found, trained(judge(None)[0], steps)[0])
    slack_bytes = 8 * 512 * 32 * 4  # what runs outside: the losses, copies of samples and their gradients
    assert max(peaks) <= budget_bytes - there_bytes + slack_bytes
    assert region.schedule_cache.waiting_bytes() == 0
    assert region.runs.replays > 0


def test_budget_error_with_two_forwards_names_backward_as_a_fix() -> None:
    budget_bytes, _ = budget(30)
    net, _ = judge(budget_bytes)
    x = torch.randn(512, 32)
    with pytest.raises(ApplyError, match=r"MT337(.|\n)*or call backward\(\) before the next forward"):
        _ = [net(x) for _ in range(400)]  # outputs and their sources remain
