"""Decided without a dispatch mode.

The same decisions as under it, one by one, the same bits and the same bytes.
"""

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
    """Filled run by run with what ran again, in order."""
    found: list[list[ReplayRecord]] = []
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


class Small(nn.Module):
    """Returns its loss, and what it is the loss of."""

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


def test_each_way_that_was_taken_is_found_again_by_what_it_took_for_granted() -> None:
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
        net.scale, before = scale, region.runs.followed
        assert same(gradients(net, x[:rows]), plain(x[:rows], scale))
        followed.append(region.runs.followed - before)
    assert followed == [0, 1, 0, 1, 1, 0, 1, 1, 1]


def test_what_depends_on_data_or_is_changed_outside_goes_through_the_mode() -> None:
    class Looks(Small):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x if x.sum() > 0 else -x)

    torch.manual_seed(0)
    net = Looks()
    region = online(net, torch.optim.SGD(net.parameters()), DTR, 1 << 40)
    x = torch.rand(16, 32)
    for sign in (1, 1, -1):
        assert same(gradients(net, sign * x), plain(x))
    assert (region.runs.steps, region.runs.followed) == (3, 0)
    assert "depends on the data" in next(iter(region.followers.why_not.values()))


def test_a_second_forward_before_backward_shares_the_budget_from_then_on() -> None:
    x = torch.randn(64, 32)
    net, region = small()
    for _ in range(2):
        gradients(net, x)
    net.zero_grad(set_to_none=True)
    (net(x)[0] + net(x)[0]).backward()
    twice = [p.grad for p in net.parameters() if p.grad is not None]
    assert (region.runs.steps, region.runs.followed) == (
        4,
        1,
    )  # the one that waited gave way and ran again, under the mode
    assert same(twice, [each + each for each in plain(x)])
    gradients(net, x)
    assert (region.runs.steps, region.runs.followed) == (5, 1)


@pytest.mark.parametrize("freeze_after", [0, 1])
def test_a_copy_of_the_model_starts_anew(freeze_after: int) -> None:
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
        assert (own.runs.steps, own.runs.followed, own.frozen_steps) == (
            (2, 1, 0) if freeze_after == 0 else (1, 0, 1)
        )
    assert deepcopy(net).forward.__self__._optimizer is region._optimizer
    assert region.runs.steps == (2 if freeze_after == 0 else 1)


def test_a_forward_that_is_never_followed_by_its_backward_holds_nothing() -> None:
    x = torch.randn(64, 32)
    net, region = small()
    gradients(net, x)
    net.zero_grad(set_to_none=True)
    out = net(x)
    assert region.followers.waiting_bytes() > 0
    del out
    assert region.followers.waiting_bytes() == 0
    assert same(gradients(net, x), plain(x))
    assert (region.runs.steps, region.runs.followed) == (2, 1)


def test_a_write_into_what_backward_needs_is_an_error() -> None:
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


def test_a_budget_that_nothing_meets_says_the_least() -> None:
    x = torch.randn(512, 32)
    net, region = small()
    gradients(net, x)
    region.settings = replace(region.settings, budget_bytes=region.runs.peak_bytes // 4)
    with pytest.raises(ApplyError, match="nothing is left to evict") as caught:
        gradients(net, x)
    assert caught.value.code == "MT337"


def test_a_device_with_less_room_than_the_books_makes_more_go() -> None:
    """An allocation fails once while it is followed: more is evicted, the op runs, the bits are the same."""
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
    assert region.runs.followed == 1
    assert same(got, plain(x))


def ledger_peaks(net: Small, x: Tensor, holds: tuple[bool, ...]) -> list[int]:
    """Step by step, bytes above what was there before.

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


def test_what_the_books_want_in_parts_is_made_part_by_part() -> None:
    """Autograd seldom keeps both ends of such a pair, so the books are spoken for here."""

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
    (followed,) = next(iter(region.followers._regions.values()))
    (waiting,) = followed._latest
    run = waiting.saved[0][0]
    first, second = (run._route.path.ops[op].numbers[run._route.tape.graph.makes[op][0]] for op in (1, 2))
    wanted = run._there[second].clone()
    gone = run._there[first]
    run._there[first] = run._there[second] = None
    run._obey([(ALONG, 1), (REPLAY, 2)], 3)
    assert run._there[first] is None
    assert torch.equal(run._there[second], wanted)
    assert run.replays == [ReplayRecord(3, 2, (1,), 4)]
    run._there[first] = gone  # as the books have it
    out.backward()
    assert region.runs.followed == 1


@pytest.mark.skipif(cpu_allocator.available() is not None, reason="no native ledger here")
def test_the_ledgers_peak_is_that_of_the_books() -> None:
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
    assert region.runs.followed == 3
    assert region.runs.replays - 3 * replays > replays > 0


@pytest.mark.skipif(cpu_allocator.available() is not None, reason="no native ledger here")
@pytest.mark.parametrize(("freeze_after", "percent"), [(0, 110), (0, 80), (1, 150)])
def test_a_second_forward_before_backward_has_what_the_first_one_leaves(
    freeze_after: int, percent: int
) -> None:
    """A schedule cannot give anything back, what is followed can."""
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
    assert region.followers.waiting_bytes() == region.warm_up.waiting_bytes() == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("name", "percent"),
    [("gpt", 60), ("cnn_bn", 85), ("autocast", 97), ("lstm", 97), ("hf_llama", 80), ("lora", 80)],
)
def test_zoo_decides_as_under_the_mode(name: str, percent: int, policy: str) -> None:
    found, budget_bytes = [], 1 << 40
    for follow in (False, False, True):
        workload, model, optimizer = build(ZOO[name])
        region = online(model, optimizer, POLICIES[policy], budget_bytes, follow=follow)
        decided = noted_decisions(region)
        found.append((trained_values(workload, model, optimizer, 8, 3, 1), decided))
        budget_bytes = region.runs.peak_bytes * percent // 100 if len(found) == 1 else budget_bytes
    assert region.runs.followed == 1
    assert same(found[0][0], found[2][0])
    assert found[1][1] == found[2][1]
    assert region.runs.replays > 0


def test_books_are_opened_while_no_other_thread_begins_or_ends_a_forward() -> None:
    """Captured code that runs again, inside a backward, has no turn of its own."""
    net, region = small()
    x = torch.randn(64, 32)
    _ = [gradients(net, x) for _ in range(2)]
    (followed,) = next(iter(region.followers._regions.values()))
    opened, begin, held, calls = region.followers.opened, followed.begin, list[bool](), list[Any]()
    followed.begin = lambda *args: calls.append(args) or begin(*args)  # type: ignore[func-returns-value, method-assign]
    gradients(net, x)

    def opening(inputs: Any) -> Any:
        thread = threading.Thread(target=lambda: held.append(not region.turn.acquire(blocking=False)))
        thread.start()
        thread.join()
        return opened(inputs)

    region.followers.opened = opening
    begin(*calls[0])
    assert held == [True]
