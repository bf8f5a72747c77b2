"""A call that differs from the schedule's is captured again, runs plainly, or raises."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.scheduled_net import CPU, Net, everything_again, frozen_net, gradients, graph_of, twin
from support.training_runs import same
from torch import Tensor, nn

from memtune.activations.capture.tape import COLLECTIVE_INSIDE
from memtune.activations.schedules.scheduled_region import ScheduledRegion
from memtune.errors import ApplyError
from memtune.program.op_schedule import OpGraph, Schedule, build_schedule, find_schedule_error, plain_schedule
from memtune.search_spaces.recompute._schedule_planner.block_schedules import _instead_of_schedule


@pytest.mark.parametrize(
    "change", ["eval", "attribute", "global", "argument", "hook", "submodule", "frozen weight", "subclass"]
)
@pytest.mark.filterwarnings("ignore:memtune runs the model without its schedule")
def test_difference_causes_a_new_capture_or_a_plain_run(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, frozen = frozen_net()
    plain, x, kwargs = twin(), torch.randn(5, 6), {}
    assert same(gradients(net, x), gradients(plain, x))
    for each in (net, plain):
        if change == "eval":
            each.eval()
        elif change == "attribute":
            each.power = 3
        elif change == "argument":
            kwargs = {"times": 2}  # an int instead of a float: possibly other ops
        elif change == "hook":
            each.two.register_forward_hook(lambda module, args, out: out * 2)
        elif change == "submodule":
            each.drop = nn.Identity()
        elif change == "frozen weight":
            each.one.weight.requires_grad_(False)
        elif change == "subclass":
            x = torch.nn.Parameter(x, requires_grad=False).as_subclass(_Odd)
    if change == "global":
        monkeypatch.setitem(Net.forward.__globals__, "SCALE", 3.0)
    assert same(gradients(net, x, **kwargs), gradients(plain, x, **kwargs))
    assert frozen.runs.frozen + frozen.runs.plain == 2
    same_ops = change in ("argument", "attribute", "global")
    assert frozen.runs.plain == (not same_ops)
    assert bool(frozen.runs.why_plain) is not same_ops


SETTINGS = SimpleNamespace(scale=1.0)


class Reads(nn.Module):
    """Reads an object that belongs to no module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * SETTINGS.scale


def test_change_of_an_object_outside_of_the_modules_causes_a_new_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, x = Reads(), torch.ones(2, 4)
    plain = copy.deepcopy(net)
    frozen = ScheduledRegion(net, plain_schedule(graph_of(net, x)), CPU)
    frozen.install()
    for scale in (1.0, 2.0, 2.0):
        monkeypatch.setattr(SETTINGS, "scale", scale)
        assert torch.equal(net(x), plain(x))
    assert (frozen.runs.frozen, frozen.runs.plain, frozen.runs.captures) == (3, 0, 2)


def test_refusal_holds_only_for_the_same_module_state() -> None:
    """The module is called first in evaluation, or with untrained weights.

    It runs its schedule when it is as planned.
    """
    for first in ("eval", "frozen weight"):
        net, frozen = frozen_net()
        x, plain = torch.randn(5, 6), twin()
        for each in (net, plain):
            each.train(first != "eval")
            each.one.weight.requires_grad_(first == "eval")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert same(*(gradients(each, x) for each in (net, plain)))
        assert len(said) == (first != "eval")
        for each in (net, plain):
            each.train()
            each.one.weight.requires_grad_(True)
        for _ in range(2):
            assert same(*(gradients(each, x) for each in (net, plain)))
        assert (frozen.runs.frozen, frozen.runs.plain, frozen.runs.captures) == (2, 1, 2)


def test_ever_changing_module_runs_plainly_with_one_warning() -> None:
    (net, frozen), plain, x = frozen_net(), twin(), torch.randn(5, 6)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(7):
            net.drop.p = plain.drop.p = 0.1 + step / 10
            assert same(gradients(net, x), gradients(plain, x))
    assert frozen.runs.captures == frozen.runs.frozen == 4
    assert frozen.runs.plain == 3
    assert [str(each.message)[:43] for each in said] == ["memtune runs the model without its schedule"]


class _Odd(Tensor):
    pass


def test_evaluation_runs_the_plain_forward() -> None:
    net, frozen = frozen_net()
    with torch.no_grad():
        assert not net(torch.ones(5, 6))[0].requires_grad
    assert frozen.runs.frozen + frozen.runs.plain == 0
    frozen.remove()
    assert "forward" not in vars(net)


def test_impossible_backward_raises() -> None:
    x = torch.randn(5, 6)
    for spoil, code in (
        (_writes_output, "MT326"),
        (_steps_early, "MT326"),
        (_backward_twice, "MT326"),
        (_second_order, "MT326"),
    ):
        with pytest.raises(ApplyError) as caught:
            spoil(frozen_net()[0], x)
        assert caught.value.code == code


def _writes_output(net: Net, x: Tensor) -> None:
    a, b = net(x)
    b.detach().mul_(2)  # the last product reads it in backward
    (a.sum() + b.sum()).backward()


def _steps_early(net: Net, x: Tensor) -> None:
    a, b = net(x)
    with torch.no_grad():
        net.two.weight.mul_(2)
    (a.sum() + b.sum()).backward()


def _backward_twice(net: Net, x: Tensor) -> None:
    loss = sum(each.sum() for each in net(x))
    loss.backward(retain_graph=True)
    loss.backward()


def _second_order(net: Net, x: Tensor) -> None:
    a, b = net(x)
    torch.autograd.grad(a.sum() + b.sum(), list(net.parameters()), create_graph=True)


class Buffered(nn.Module):
    """Reads a buffer and a weight without gradient, in backward too.

    `counts` into another buffer, which it has read.
    """

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.counts = nn.Linear(6, 8), nn.Linear(8, 3).requires_grad_(False), counts
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.register_buffer("bias", torch.ones(8))
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(torch.tanh(self.one(x) + self.bias + self.n) * self.scale)
        if self.counts:
            self.n.add_(1)
        return y


def frozen_buffered(
    again: Callable[[OpGraph], Schedule], counts: bool = False
) -> tuple[Buffered, ScheduledRegion]:
    net = Buffered(counts)
    frozen = ScheduledRegion(net, again(graph_of(net, torch.ones(5, 6))), CPU)
    frozen.install()
    return net, frozen


@pytest.mark.parametrize("again", [plain_schedule, everything_again])
@pytest.mark.parametrize("name", ["scale", "two.weight", "bias"])
def test_write_to_a_tensor_that_backward_reads_raises(
    name: str, again: Callable[[OpGraph], Schedule]
) -> None:
    x, (net, _) = torch.randn(5, 6), frozen_buffered(again)
    out = net(x).sum()
    with torch.no_grad():
        net.get_parameter(name).mul_(5) if name == "two.weight" else net.get_buffer(name).mul_(5)
    if (
        name == "bias" and again is plain_schedule
    ):  # its backward does not read it: the plain module's neither
        out.backward()
        assert same([net.one.weight.grad], [_trained(Buffered(), x)])
        return
    with pytest.raises(ApplyError, match="written into"):
        out.backward()


def test_reader_of_a_buffer_before_its_write_runs_once() -> None:
    (net, frozen), plain = frozen_buffered(plain_schedule, counts=True), Buffered(counts=True)
    graph = graph_of(plain, torch.ones(5, 6))
    adds = graph.names.index("aten.add.Tensor", graph.names.index("aten.add.Tensor") + 1)  # n
    again = [op for op in range(graph.n_forward) if op <= adds]
    assert find_schedule_error(
        graph, build_schedule(graph, range(graph.n_forward), [*again, *range(graph.n_forward, graph.n_ops)])
    )
    for each in (net, plain):
        sum(out.sum() for out in [each(torch.ones(5, 6)), each(torch.zeros(5, 6))]).backward()
    assert frozen.runs.frozen == 2
    assert torch.equal(net.one.weight.grad, plain.one.weight.grad)


def _trained(net: Buffered, x: Tensor) -> Tensor:
    net.zero_grad()
    net(x).sum().backward()
    assert net.one.weight.grad is not None
    return net.one.weight.grad


CALLS = [0]
OF_FILE = np.random.default_rng(5)


class Odd(nn.Module):
    """Does things that a schedule cannot repeat."""

    calls = 0

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what, self.count, self.cache = nn.Linear(4, 4), what, 0, torch.ones(4)
        self.own = random.Random(5)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.what == "counts":
            self.count += 1
        elif self.what == "draws":
            y = y * random.random()
        elif self.what == "draws from its own":
            y = y * self.own.random()
        elif self.what == "draws from the file's":
            y = y * OF_FILE.random()
        elif self.what == "counts in a global":
            CALLS[0] += 1
            y = y * CALLS[0]
        elif self.what == "counts in its class":
            Odd.calls += 1
        elif self.what == "writes":
            x.mul_(2)
        elif self.what == "looks":
            y = y * 2 if y.sum() > 0 else y
        elif self.what == "tensor":
            y = y * self.cache
        elif self.what == "noise":
            y = y * (random.random() * self.cache)
        return {1, 2} if self.what == "returns" else y


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("counts", "sets the attribute count"),
        ("draws", "random numbers in Python"),
        ("draws from its own", "random numbers in Python"),
        ("draws from the file's", "random numbers in Python"),
        ("writes", "aten.mul_.Tensor: it writes into the region's input"),
        ("looks", "depends on the data"),
        ("tensor", "neither parameter nor buffer"),
        ("returns", "returns a set"),
        ("noise", "neither parameter nor buffer"),
        ("counts in a global", "changes CALLS"),
        ("counts in its class", "changes calls"),
    ],
)
@pytest.mark.filterwarnings("ignore:memtune runs the model without its schedule")
def test_refusals_name_the_reason_without_side_effects(what: str, why: str) -> None:
    net = Odd(what)
    frozen = ScheduledRegion(net, Schedule("?", (), ()), CPU)
    frozen.install()
    random.seed(0)
    counted, own, of_file = [*CALLS, Odd.calls], random.Random(5), copy.deepcopy(OF_FILE)
    net(torch.ones(2, 4))
    assert sum([*CALLS, Odd.calls]) - sum(counted) == what.startswith("counts in")
    assert why in frozen.runs.why_plain
    drawn = random.getstate()
    random.seed(0)
    if what in ("draws", "noise"):
        random.random()
    assert drawn == random.getstate()  # by the plain run alone
    if what == "draws from its own":
        own.random()
    elif what == "draws from the file's":
        of_file.random()
    assert own.getstate() == net.own.getstate()
    assert of_file.random() == copy.deepcopy(OF_FILE).random()
    assert net.count == (what == "counts")  # the plain run's own
    assert net.cache.device == CPU
    assert all(type(p) is nn.Parameter and type(p.data) is Tensor for p in net.parameters())


class Later(nn.Module):
    """Draws in a step that is not its first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * random.random() if torch.initial_seed() > 7 else y


@pytest.mark.filterwarnings("ignore:memtune runs the model without its schedule")
def test_draws_of_a_later_step_are_made() -> None:
    net = Later()
    plain = copy.deepcopy(net)
    frozen = ScheduledRegion(net, Schedule("?", (), ()), CPU)
    frozen.install()
    for seed in (7, 8):
        grads = []
        for each in (plain, net):
            torch.manual_seed(seed)
            random.seed(seed)
            each.zero_grad()
            each(torch.ones(2, 4)).sum().backward()
            grads.append(each.linear.weight.grad)
        assert torch.equal(*grads)
    assert "draws random numbers in Python in some steps: it names random" in frozen.runs.why_plain


def test_warning_names_autocast_that_the_schedule_lacks() -> None:
    (net, frozen), x = frozen_net(), torch.randn(5, 6)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.warns(UserWarning, match="under autocast: the schedule was made for"),
    ):
        gradients(net, x)
    assert frozen.runs.plain == 1


def test_fix_for_a_collective_names_no_recompute() -> None:
    assert _instead_of_schedule(
        f"it cannot be captured: c10d.allreduce_.default: {COLLECTIVE_INSIDE}", "selective"
    ).endswith("recompute: {kind: none}")
    assert _instead_of_schedule("it runs other ops", "selective").endswith("recompute: {kind: selective}")


SIZES: list[int] = []


class Remembers(nn.Module):
    """Fills attributes that it finds empty."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if not SIZES:
            SIZES.append(len(x))
        y: Tensor = self.linear(x)
        return y


def test_side_effect_of_a_first_forward_is_no_permanent_refusal() -> None:
    net, x = Remembers(), torch.ones(2, 4)
    SIZES.append(2)
    frozen = ScheduledRegion(net, plain_schedule(graph_of(net, x)), CPU)
    frozen.install()
    SIZES.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            net(x).sum().backward()
    assert (frozen.runs.plain, frozen.runs.frozen, frozen.runs.captures, len(SIZES)) == (1, 2, 2, 1)
