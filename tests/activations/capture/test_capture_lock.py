"""Threads that share a module: no other thread sees a capture's fake tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memtune.activations.capture.capture_lock import CaptureLock
from memtune.activations.capture.region_capture import capture, shapes_of
from memtune.activations.eviction.evicting_region import OnlineRegion, OnlineSettings
from memtune.activations.eviction.eviction_pass import online_policy
from memtune.activations.eviction.op_metadata import Costs
from memtune.activations.eviction.policy import DTR
from memtune.activations.schedules.scheduled_region import ScheduledRegion
from memtune.program.op_schedule import plain_schedule
from memtune.runtime.rng_state import autocast_now

CPU = torch.device("cpu")
LONG_S, SHORT_S = 20.0, 0.3


class Pause:
    """Holds a forward in its middle until another thread has entered it, or for a while."""

    def __init__(self) -> None:
        self.where: Callable[[Tensor], bool] = lambda weight: False
        self.begun, self.other = threading.Event(), threading.Event()

    def here(self, weight: Tensor) -> None:
        if self.where(weight):
            self.begun.set()
            self.other.wait(SHORT_S)


PAUSE = Pause()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.one(x))
        PAUSE.here(self.one.weight)
        return self.two(y).sum()


@pytest.fixture(autouse=True)
def _pause() -> None:
    PAUSE.__init__()  # type: ignore[misc]


def frozen(net: Net) -> ScheduledRegion:
    tape = capture(
        net, net.forward, shapes_of(((torch.ones(5, 6),), {})), autocast_now(), lambda i, out: True
    )
    region = ScheduledRegion(net, plain_schedule(tape.graph), CPU)
    region.install()
    return region


def online(net: Net, freeze_after: int = 0) -> OnlineRegion:
    settings = OnlineSettings(online_policy(DTR), 1 << 20, Costs(1e9, 1e9, 1e-6), freeze_after=freeze_after)
    region = OnlineRegion(net, torch.optim.SGD(net.parameters()), settings, CPU)
    region.install()
    return region


def cached(net: Net) -> OnlineRegion:
    """Return a region whose next call captures the module for a schedule."""
    region = online(net, freeze_after=1)
    gradients(net, torch.ones(5, 6))
    return region


def gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(net(x), list(net.parameters())))


def evaluated(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = net(x)
    return found


def built(install: Callable[[Net], Any]) -> tuple[Net, Any, Net]:
    """Return a module, its region, and a plain copy."""
    torch.manual_seed(0)
    net = Net()
    plain = deepcopy(net)
    return net, install(net), plain


@pytest.mark.parametrize("install", [frozen, cached])
def test_evaluation_during_a_capture_sees_no_fakes(install: Callable[[Net], Any]) -> None:
    net, _, plain = built(install)
    x, y = torch.randn(5, 6), torch.randn(5, 6)
    wanted, gave = evaluated(plain, y), gradients(plain, x)
    PAUSE.where = lambda weight: isinstance(weight, FakeTensor)

    def evaluate() -> Tensor:
        assert PAUSE.begun.wait(LONG_S)
        try:
            return evaluated(net, y)
        finally:
            PAUSE.other.set()

    with ThreadPoolExecutor(1) as pool:
        out = pool.submit(evaluate)
        got = gradients(net, x)
        assert torch.equal(out.result(LONG_S), wanted)
    assert PAUSE.begun.is_set()  # it was captured
    assert all(map(torch.equal, got, gave))


@pytest.mark.parametrize("install", [frozen, cached])
def test_capture_waits_for_a_running_evaluation(install: Callable[[Net], Any]) -> None:
    net, _, plain = built(install)
    x, y = torch.randn(5, 6), torch.randn(5, 6)
    wanted, gave, me = evaluated(plain, y), gradients(plain, x), threading.get_ident()
    captures = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def meet(weight: Tensor) -> bool:
            if threading.get_ident() != me:
                PAUSE.begun.set()
                captures.wait(SHORT_S)  # which it does not, as long as this thread is here
            elif isinstance(weight, FakeTensor):
                captures.set()
                wait([out], SHORT_S)
            return False

        PAUSE.where = meet
        out = pool.submit(evaluated, net, y)
        assert PAUSE.begun.wait(LONG_S)
        got = gradients(net, x)
        assert torch.equal(out.result(LONG_S), wanted)
    assert captures.is_set()
    assert all(map(torch.equal, got, gave))


def test_capture_is_shared_by_first_calls_in_two_threads() -> None:
    net, region, plain = built(frozen)
    PAUSE.where = lambda weight: isinstance(weight, FakeTensor)
    given = [torch.randn(5, 6) for _ in range(4)]
    with ThreadPoolExecutor(len(given)) as pool:
        found = list(pool.map(lambda x: gradients(net, x), given))
    for got, x in zip(found, given, strict=True):
        assert all(map(torch.equal, got, gradients(plain, x)))
    assert (region.runs.captures, region.runs.frozen, region.runs.plain) == (1, 4, 0)


def test_online_forwards_of_several_threads_are_serialized() -> None:
    net, region, plain = built(online)
    inside: list[int] = []
    most = 0

    def count(weight: Tensor) -> bool:
        nonlocal most
        inside.append(threading.get_ident())
        most = max(most, len(set(inside)))
        threading.Event().wait(SHORT_S / 10)
        inside.remove(threading.get_ident())
        return False

    given = [torch.randn(5, 6) for _ in range(4)]
    wanted = [gradients(plain, x) for x in given]
    PAUSE.where = count
    with ThreadPoolExecutor(len(given)) as pool:
        found = list(pool.map(lambda x: gradients(net, x), given))
    assert most == 1
    for got, gave in zip(found, wanted, strict=True):
        assert all(map(torch.equal, got, gave))
    assert region.runs.steps >= len(given)


def test_lock_does_not_wait_for_its_own_thread() -> None:
    """A thread in the module's own code continues although another thread waits to capture.

    It does not wait for others inside.
    """
    lock, inside, waits = CaptureLock(), threading.Barrier(3), threading.Event()

    def calls_itself() -> bool:
        with lock.running():
            inside.wait(LONG_S)
            assert waits.wait(LONG_S)
            with lock.running(), lock:
                found = lock.wait_alone()
            inside.wait(LONG_S)
        return found

    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(calls_itself) for _ in range(2)]
        inside.wait(LONG_S)
        with lock:
            assert not lock.is_alone()
            waits.set()
        inside.wait(LONG_S)
        with lock:
            assert lock.wait_alone()
        assert [each.result(LONG_S) for each in both] == [False, False]


def test_copied_module_has_its_own_lock() -> None:
    net, region, _ = built(frozen)
    copied = deepcopy(net)
    with region._lock, ThreadPoolExecutor(1) as pool:
        pool.submit(evaluated, copied, torch.ones(5, 6)).result(LONG_S)
