"""Replays without a dispatch mode: the same decisions, bits and bytes as under it."""

from __future__ import annotations

import gc
import io
import threading
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.training_runs import same, trained_values
from support.zoo_paths import ZOO
from torch import Tensor, nn
from torch.nn import functional

from memtune.activations.eviction.evictable_tensor import ReplayRecord
from memtune.activations.eviction.evicting_region import OnlineRegion, OnlineSettings
from memtune.activations.eviction.op_metadata import Costs
from memtune.activations.eviction.policy import ALONG, COOP, DTR, MEGTAICHI, REPLAY, Policy
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.testing.training import build

CPU = torch.device("cpu")
POLICIES = {"dtr": DTR, "coop": COOP, "megtaichi": MEGTAICHI}


def online(model: nn.Module, optimizer: Any, policy: Policy, budget_bytes: int, **more: Any) -> OnlineRegion:
    policy = replace(policy, in_place=True, forget=True, compacts=True)
    settings = OnlineSettings(policy, budget_bytes, Costs(1e11, 1e10, 1e-6), **{"freeze_after": 0, **more})
    region = OnlineRegion(model, optimizer, settings, CPU)
    region.install()
    return region


def noted_decisions(region: OnlineRegion) -> list[list[ReplayRecord]]:
    """List filled run by run with the replays, in order."""
    found: list[list[ReplayRecord]] = []
    note = region.schedule_cache.note

    def noting(key: Any, decided: Any) -> None:
        assert decided is not None
        found.append(decided.replays)
        note(key, decided)

    region.schedule_cache.note = noting  # type: ignore[method-assign]
    return found


class Net(nn.Module):
    """Net with dropout, batch norm, views, an in-place op, an elementwise chain, and settings of its own."""

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
) -> tuple[list[Tensor], OnlineRegion, list[list[ReplayRecord]]]:
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
def test_replayer_decides_as_the_mode(name: str, percent: int) -> None:
    policy = POLICIES[name]
    plain, free, _ = trained(policy, 1 << 40, use_replayer=False)
    budget_bytes = free.runs.peak_bytes * percent // 100
    under, mode, decided = trained(policy, budget_bytes, use_replayer=False)
    got, region, again = trained(policy, budget_bytes)
    assert same(got, plain)
    assert same(under, plain)
    assert again == decided
    assert all(decided)
    assert replace(region.runs, steps_without_mode=0) == mode.runs
    assert (mode.runs.steps_without_mode, region.runs.steps_without_mode) == (0, 2), region.replayer.why_not


class Small(nn.Module):
    """Returns its loss, and the loss's source."""

    def __init__(self) -> None:
        super().__init__()
        layers = (
            layer for _ in range(3) for layer in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
        )
        self.body, self.last, self.scale = nn.Sequential(*layers), nn.Linear(32, 64), 1.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.last(self.body(x)) * self.scale
        return y.square().mean(), y


def small(budget_bytes: int = 1 << 40, **more: Any) -> tuple[Small, OnlineRegion]:
    torch.manual_seed(0)
    net = Small()
    return net, online(net, torch.optim.SGD(net.parameters()), DTR, budget_bytes, **more)


def gradients(net: Small, x: Tensor) -> list[Tensor]:
    net.zero_grad(set_to_none=True)
    net(x)[0].backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def plain(x: Tensor, scale: float = 1.0) -> list[Tensor]:
    torch.manual_seed(0)
    net = Small()
    net.scale = scale
    return gradients(net, x)


def test_replayer_finds_each_logged_path_by_its_guards() -> None:
    torch.manual_seed(1)
    x = torch.randn(64, 32)
    net, region = small()
    followed = []
    for scale, rows in (
        (1.0, 64),
        (1.0, 64),
        (2.0, 64),
        (2.0, 64),
        (1.0, 64),
        (1.0, 48),
        (1.0, 48),
        (2.0, 64),
        (1.0, 64),
    ):
        net.scale, before = scale, region.runs.steps_without_mode
        assert same(gradients(net, x[:rows]), plain(x[:rows], scale))
        followed.append(region.runs.steps_without_mode - before)
    assert followed == [0, 1, 0, 1, 1, 0, 1, 1, 1]


def test_data_dependence_and_outside_writes_use_the_mode() -> None:
    class Looks(Small):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x if x.sum() > 0 else -x)

    torch.manual_seed(0)
    net = Looks()
    region = online(net, torch.optim.SGD(net.parameters()), DTR, 1 << 40)
    x = torch.rand(16, 32)
    for sign in (1, 1, -1):
        assert same(gradients(net, sign * x), plain(x))
    assert (region.runs.steps, region.runs.steps_without_mode) == (3, 0)
    assert "depends on the data" in next(iter(region.replayer.why_not.values()))


def test_second_forward_before_backward_shares_the_budget() -> None:
    x = torch.randn(64, 32)
    net, region = small()
    for _ in range(2):
        gradients(net, x)
    net.zero_grad(set_to_none=True)
    (net(x)[0] + net(x)[0]).backward()
    twice = [p.grad for p in net.parameters() if p.grad is not None]
    assert (region.runs.steps, region.runs.steps_without_mode) == (
        4,
        1,
    )  # the waiting one was preempted and ran again, under the mode
    assert same(twice, [each + each for each in plain(x)])
    gradients(net, x)
    assert (region.runs.steps, region.runs.steps_without_mode) == (5, 1)


@pytest.mark.parametrize("freeze_after", [0, 1])
def test_copied_model_starts_without_logs(freeze_after: int) -> None:
    x = torch.randn(64, 32)
    net, region = small(freeze_after=freeze_after)
    for _ in range(2):
        gradients(net, x)
    stored = io.BytesIO()
    torch.save(net, stored)
    stored.seek(0)
    for copied in (deepcopy(net), torch.load(stored, weights_only=False)):
        own = copied.forward.__self__
        assert own is not region
        assert own.module is copied
        with torch.no_grad():
            copied.last.weight.mul_(2)
            wanted = functional.linear(net.body(x), net.last.weight * 2, net.last.bias)
            assert torch.equal(copied(x)[1], wanted)
            copied.last.weight.div_(2)
        for _ in range(2):
            assert same(gradients(copied, x), plain(x))
        assert (own.runs.steps, own.runs.steps_without_mode, own.frozen_steps) == (
            (2, 1, 0) if freeze_after == 0 else (1, 0, 1)
        )
    assert deepcopy(net).forward.__self__._optimizer is region._optimizer
    assert region.runs.steps == (2 if freeze_after == 0 else 1)


def test_abandoned_forward_holds_no_memory() -> None:
    x = torch.randn(64, 32)
    net, region = small()
    gradients(net, x)
    net.zero_grad(set_to_none=True)
    out = net(x)
    assert region.replayer.waiting_bytes() > 0
    del out
    assert region.replayer.waiting_bytes() == 0
    assert same(gradients(net, x), plain(x))
    assert (region.runs.steps, region.runs.steps_without_mode) == (2, 1)


def test_write_to_a_saved_tensor_raises() -> None:
    x = torch.randn(64, 32)
    net, _ = small()
    gradients(net, x)
    net.zero_grad(set_to_none=True)
    loss, y = net(x)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(ApplyError) as caught:
        loss.backward()
    assert caught.value.code == "MT326"


def test_impossible_budget_raises_with_the_least_one() -> None:
    x = torch.randn(512, 32)
    net, region = small()
    gradients(net, x)
    region.settings = replace(region.settings, budget_bytes=region.runs.peak_bytes // 4)
    with pytest.raises(ApplyError, match="nothing is left to evict") as caught:
        gradients(net, x)
    assert caught.value.code == "MT337"


def test_device_out_of_memory_evicts_more() -> None:
    """An allocation fails once in a replayed run: more is evicted, the op runs, the bits are the same."""
    x = torch.randn(512, 32)
    net, region = small()
    gradients(net, x)
    gelu_backward = torch.ops.aten.gelu_backward.default
    failed = []

    class Fails(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is gelu_backward and not failed:
                failed.append(func)
                raise torch.OutOfMemoryError("no room")
            return func(*args, **(kwargs or {}))

    with Fails():
        got = gradients(net, x)
    assert failed
    assert region.runs.steps_without_mode == 1
    assert same(got, plain(x))


def ledger_peaks(net: Small, x: Tensor, holds: tuple[bool, ...]) -> list[int]:
    """Return by step the peak above the bytes before it.

    Where it holds it, the caller keeps what forward returned.
    """
    peaks = []
    with Ledger.open(CPU) as ledger:
        for hold in holds:
            net.zero_grad(set_to_none=True)
            gc.collect()
            before_bytes = ledger.live_bytes()
            ledger.reset_peak()
            loss, y = net(x)
            held = y if hold else None
            del y
            loss.backward()
            peaks.append(ledger.peak_allocated_bytes() - before_bytes)
            del loss, held
    return peaks


def test_replay_in_parts_equals_the_mode() -> None:
    """Autograd seldom keeps both ends of such a pair, so the test calls the rematerializer's journal
    itself.
    """

    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x: Tensor) -> Tensor:
            y = functional.leaky_relu(functional.leaky_relu(x @ self.weight, 0.1), 0.2)
            return (y @ self.weight).square().mean()

    net, x = Gates(), torch.randn(64, 64)
    region = online(net, torch.optim.SGD(net.parameters()), replace(DTR, parts=4), 1 << 40)
    net(x).backward()
    net.zero_grad(set_to_none=True)
    out = net(x)
    (followed,) = next(iter(region.replayer._regions.values()))
    (waiting,) = followed._latest
    run = waiting.saved[0][0]
    first, second = (run._route.path.ops[op].numbers[run._route.tape.graph.makes[op][0]] for op in (1, 2))
    wanted = run._there[second].clone()
    gone = run._there[first]
    run._there[first] = run._there[second] = None
    run._apply_journal([(ALONG, 1), (REPLAY, 2)], 3)
    assert run._there[first] is None
    assert torch.equal(run._there[second], wanted)
    assert run.replays == [ReplayRecord(3, 2, (1,), 4)]
    run._there[first] = gone  # as the rematerializer accounts it
    out.backward()
    assert region.runs.steps_without_mode == 1


@pytest.mark.skipif(cpu_allocator.available() is not None, reason="no native ledger here")
def test_ledger_peak_equals_the_accounted_peak() -> None:
    x = torch.randn(512, 32)
    free, region = small()
    gradients(free, x)
    budget_bytes = region.runs.peak_bytes * 54 // 100
    net, region = small(budget_bytes)
    there_bytes = sum(p.nbytes for p in net.parameters()) + x.nbytes
    under_mode, *followed = ledger_peaks(net, x, (False, False, False))
    assert followed == [region.runs.peak_bytes - there_bytes] * 2
    assert under_mode == pytest.approx(followed[0], abs=64)  # autograd's own scalars
    replays = region.runs.replays // 3
    (longer,) = ledger_peaks(net, x, (True,))  # then something else must go
    assert longer <= budget_bytes - there_bytes
    assert region.runs.steps_without_mode == 3
    assert region.runs.replays - 3 * replays > replays > 0


@pytest.mark.skipif(cpu_allocator.available() is not None, reason="no native ledger here")
@pytest.mark.parametrize(("freeze_after", "percent"), [(0, 110), (0, 80), (1, 150)])
def test_second_forward_gets_the_bytes_that_the_first_does_not_hold(freeze_after: int, percent: int) -> None:
    """A schedule cannot free anything in between, a replayed run can."""
    x = torch.randn(512, 32)
    free, region = small()
    gradients(free, x)
    there_bytes = sum(p.nbytes for p in free.parameters()) + x.nbytes
    budget_bytes = there_bytes + (region.runs.peak_bytes - there_bytes) * percent // 100
    net, region = small(budget_bytes, freeze_after=freeze_after)
    for _ in range(2):
        gradients(net, x)
    for _ in range(2):
        net.zero_grad(set_to_none=True)
        gc.collect()
        with Ledger.open(CPU) as ledger:
            before_bytes = ledger.live_bytes()
            (net(x)[0] + net(x)[0]).backward()
            assert (
                ledger.peak_allocated_bytes() - before_bytes <= budget_bytes - there_bytes + 64
            )  # autograd's own scalars
        assert same(
            [p.grad for p in net.parameters() if p.grad is not None], [each + each for each in plain(x)]
        )
    assert region.replayer.waiting_bytes() == region.schedule_cache.waiting_bytes() == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("name", "percent"),
    [("gpt", 60), ("cnn_bn", 85), ("autocast", 97), ("lstm", 97), ("hf_llama", 80), ("lora", 80)],
)
def test_replayer_decides_as_the_mode_on_the_zoo(name: str, percent: int, policy: str) -> None:
    found, budget_bytes = [], 1 << 40
    for use_replayer in (False, False, True):
        workload, model, optimizer = build(ZOO[name])
        region = online(model, optimizer, POLICIES[policy], budget_bytes, use_replayer=use_replayer)
        decided = noted_decisions(region)
        found.append((trained_values(workload, model, optimizer, 8, 3, 1), decided))
        budget_bytes = region.runs.peak_bytes * percent // 100 if len(found) == 1 else budget_bytes
    assert region.runs.steps_without_mode == 1
    assert same(found[0][0], found[2][0])
    assert found[1][1] == found[2][1]
    assert region.runs.replays > 0


def test_rematerializer_is_opened_under_the_forward_lock() -> None:
    """Captured code that runs again inside a backward does not hold the lock itself."""
    net, region = small()
    x = torch.randn(64, 32)
    _ = [gradients(net, x) for _ in range(2)]
    (followed,) = next(iter(region.replayer._regions.values()))
    opened, begin, held, calls = region.replayer.opened, followed.begin, list[bool](), list[Any]()
    followed.begin = lambda *args: calls.append(args) or begin(*args)  # type: ignore[func-returns-value, method-assign]
    gradients(net, x)

    def opening(inputs: Any) -> Any:
        thread = threading.Thread(target=lambda: held.append(not region.forward_lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        return opened(inputs)

    region.replayer.opened = opening
    begin(*calls[0])
    assert held == [True]
