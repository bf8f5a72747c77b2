"""Loops with several forwards before a backward, after others with one each; none exceeds a sufficient
budget.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import nullcontext
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
from memtune.activations.eviction.preemption import PreemptibleRun
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.runtime.memory_tiers import HOST, tier

CPU = torch.device("cpu")
LARGE = 1 << 40
Step = Callable[[nn.Module, Tensor, Tensor], None]


class Judge(nn.Module):
    """Discriminator of real samples; draws random numbers."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        layers = (
            layer for _ in range(3) for layer in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
        )
        self.body, self.drop = nn.Sequential(*layers), nn.Dropout(0.2)
        self.norm, self.last = nn.BatchNorm1d(32) if norm else nn.Identity(), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.drop(self.body(x))))
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


def judge(
    budget_bytes: int | None, policy: Policy = DTR, freeze_after: int = 0, **more: Any
) -> tuple[Judge, Any]:
    torch.manual_seed(0)
    net = Judge(**more)
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
            found += [each.clone() for each in net.buffers()]
            found += [net.flowed] if hasattr(net, "flowed") else []  # type: ignore[list-item]
        net.zero_grad(set_to_none=True)
    return found, peaks


def budget(percent: int) -> tuple[int, int]:
    """Return a budget of `percent` of one forward and backward, and the background bytes."""
    net, region = judge(LARGE)
    trained(net, [once])
    there_bytes = sum(p.nbytes for p in net.parameters()) + 512 * 32 * 4
    return there_bytes + (region.runs.peak_bytes - there_bytes) * percent // 100, there_bytes


needs_ledger = pytest.mark.skipif(cpu_allocator.available() is not None, reason="no native ledger here")


@needs_ledger
@pytest.mark.filterwarnings("ignore:memtune decides evictions")
@pytest.mark.parametrize("freeze_after", [0, 1])
@pytest.mark.parametrize("step", [apart, contrastive], ids=lambda each: each.__name__)
def test_loop_changing_to_two_forwards_stays_within_the_budget(step: Step, freeze_after: int) -> None:
    loops([once, once, step, step], DTR, freeze_after, 60)


@needs_ledger
@pytest.mark.slow
@pytest.mark.parametrize("policy", [DTR, COOP, MEGTAICHI], ids=["dtr", "coop", "megtaichi"])
@pytest.mark.filterwarnings("ignore:memtune decides evictions")
@pytest.mark.parametrize("freeze_after", [0, 1, 3])
def test_two_forwards_train_from_the_first_step_or_occasionally(policy: Policy, freeze_after: int) -> None:
    for steps in (
        [apart, adversarial],
        [once, once, once, once, apart, once, adversarial, contrastive, asked, once],
    ):
        loops(steps, policy, freeze_after, 75)


def loops(steps: list[Step], policy: Policy, freeze_after: int, percent: int) -> None:
    budget_bytes, there_bytes = budget(percent)
    net, region = judge(budget_bytes, policy, freeze_after)
    found, peaks = trained(net, steps)
    assert same(found, trained(judge(None)[0], steps)[0])
    slack_bytes = 8 * 512 * 32 * 4  # what runs outside: the losses, copies of samples and their gradients
    assert max(peaks) <= budget_bytes - there_bytes + slack_bytes
    assert region.replayer.waiting_bytes() == region.schedule_cache.waiting_bytes() == 0
    assert region.runs.replays > 0


@needs_ledger
@pytest.mark.slow
@pytest.mark.parametrize("freeze_after", [0, 1])
def test_run_that_writes_buffers_is_not_preempted(freeze_after: int) -> None:
    """A norm's statistics would be updated twice, so the waiting run keeps its memory."""
    net, region = judge(LARGE, freeze_after=freeze_after, norm=True)
    steps = [once, once, once, adversarial, apart]
    assert same(trained(net, steps)[0], trained(judge(None, norm=True)[0], steps)[0])
    assert region.frozen_steps > 0 if freeze_after else region.runs.steps_without_mode > 0


def test_write_to_an_argument_of_a_preempted_run_raises() -> None:
    net, _ = judge(LARGE, freeze_after=1)
    x = torch.randn(64, 32)
    for _ in range(2):
        net(x).sum().backward()
    one = net(x).sum()
    other = net(x.clone()).sum()
    x.add_(1)
    other.backward()
    with pytest.raises(ApplyError, match="written into"):
        one.backward()


def changed_between(
    net: nn.Module, real: Tensor, fake: Tensor, change: Callable[[Any], Any], undo: Callable[[Any], Any]
) -> None:
    one = net(real)
    change(net)
    other = net(fake)
    with torch.autocast("cpu", dtype=torch.bfloat16) if change is nothing else nullcontext():
        one.square().mean().backward()
        other.abs().mean().backward()
    undo(net)


def nothing(net: nn.Module) -> None:
    """Backward runs in autocast, forward did not."""


def new_weight(net: Any) -> None:
    net.kept, net.last.weight = [net.last.weight], nn.Parameter(net.last.weight.detach() * 3)


def old_weight(net: Any) -> None:
    net.last.weight = net.kept.pop()


def no_gradient(net: Any) -> None:
    net.last.bias.requires_grad_(False)
    net.last.bias.grad = torch.zeros(1)


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "eval": (lambda net: net.eval(), lambda net: net.train()),
    "attribute": (lambda net: setattr(net.drop, "p", 0.7), lambda net: setattr(net.drop, "p", 0.2)),
    "autocast": (nothing, nothing),
    "parameter": (new_weight, old_weight),
    "frozen": (no_gradient, lambda net: net.last.bias.requires_grad_(True)),
}
RARE = ("parameter", "frozen")


@pytest.mark.filterwarnings("ignore:memtune decides evictions")
@pytest.mark.parametrize("freeze_after", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    "what", [pytest.param(each, marks=pytest.mark.slow) if each in RARE else each for each in CHANGES]
)
def test_second_run_ignores_changes_of_the_module(what: str, freeze_after: int) -> None:
    """The second run does not depend on changes of the module, and leaves them in place."""
    steps: list[Step] = [once, once, once, lambda *given: changed_between(*given, *CHANGES[what])]
    net, region = judge(LARGE, freeze_after=freeze_after)
    found, want = trained(net, steps)[0], trained(judge(None)[0], steps)[0]
    assert same(found, want)
    assert region.frozen_steps + region.runs.steps_without_mode >= 2
    assert all(each.training for each in net.modules())


def plus_one(parameter: Any) -> None:
    parameter.grad += 1


def hooked_between(net: Any, real: Tensor, fake: Tensor) -> None:
    one, other = net(real), net(fake)
    handles = [
        net.last.weight.register_hook(lambda gradient: gradient * 2),
        net.last.bias.register_post_accumulate_grad_hook(plus_one),
    ]
    one.square().mean().backward()
    other.abs().mean().backward()
    for each in handles:
        each.remove()


def hooked_after_one(net: Any, real: Tensor, fake: Tensor) -> None:
    one = net(real).square().mean()
    handle = net.last.weight.register_hook(lambda gradient: gradient * 2)
    other = net.last.bias.register_post_accumulate_grad_hook(plus_one)
    one.backward()
    handle.remove()
    other.remove()


def unhooked_between(net: Any, real: Tensor, fake: Tensor) -> None:
    handle = net.last.weight.register_hook(lambda gradient: gradient * 2)
    one = net(real)
    handle.remove()
    other = net(fake)
    one.square().mean().backward()
    other.abs().mean().backward()


@pytest.mark.filterwarnings("ignore:memtune decides evictions")
@pytest.mark.parametrize("freeze_after", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    "step", [hooked_between, hooked_after_one, unhooked_between], ids=lambda each: each.__name__
)
def test_hooks_added_or_removed_before_backward_are_called_as_usual(step: Step, freeze_after: int) -> None:
    steps: list[Step] = [once, once, once, step, step]
    net, region = judge(LARGE, freeze_after=freeze_after)
    assert same(trained(net, steps)[0], trained(judge(None)[0], steps)[0])
    assert region.frozen_steps + region.runs.steps_without_mode >= 2


@pytest.mark.filterwarnings("ignore:memtune decides evictions")
@pytest.mark.parametrize("backward_first", [True, False])
def test_backward_and_forward_in_two_threads_do_not_race(
    backward_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread is stopped after it has checked whether the run still waits.

    The other one comes in between, as far as it can.
    """
    (net, _), (plain, _) = judge(LARGE, freeze_after=1), judge(None)
    net.eval()
    plain.eval()
    x = torch.randn(8, 32)
    parameters = list(net.parameters())
    for _ in range(2):
        torch.autograd.grad(net(x).sum(), parameters)
    waits = net(x).sum()
    stopped, go_on = threading.Event(), threading.Event()
    name = "_require_first_order" if backward_first else "_may_run_again"
    looked = getattr(PreemptibleRun, name)

    def stop(run: PreemptibleRun) -> Any:
        found = looked(run)
        if threading.current_thread() is not threading.main_thread() and not stopped.is_set():
            stopped.set()
            go_on.wait(0.2)  # the other one may have to wait for this one
        return found

    monkeypatch.setattr(PreemptibleRun, name, stop)
    found: dict[bool, Any] = {}

    def backward() -> None:
        found[True] = torch.autograd.grad(waits, parameters)

    def forward() -> None:
        found[False] = torch.autograd.grad(net(x).sum(), parameters)

    first, second = (backward, forward) if backward_first else (forward, backward)
    thread = threading.Thread(target=first)
    thread.start()
    assert stopped.wait(20)
    second()
    go_on.set()
    thread.join()
    want = torch.autograd.grad(plain(x).sum(), list(plain.parameters()))
    assert all(same(list(each), list(want)) for each in found.values())
    assert len(found) == 2


def test_budget_error_with_two_forwards_names_backward_as_a_fix() -> None:
    budget_bytes, _ = budget(30)
    net, _ = judge(budget_bytes)
    x = torch.randn(512, 32)
    with pytest.raises(ApplyError, match=r"MT337(.|\n)*or call backward\(\) before the next forward"):
        _ = [net(x) for _ in range(400)]  # outputs and their sources remain
