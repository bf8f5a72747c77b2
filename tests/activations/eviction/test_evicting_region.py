"""Online eviction: bitwise results within the budget, for data-dependent models as well."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.training_runs import same, trained_values
from support.zoo_paths import ZOO
from torch import Tensor, nn

from memtune.activations.eviction.evicting_region import OnlineRegion, OnlineSettings, _Mode
from memtune.activations.eviction.eviction_table import OnlineTable
from memtune.activations.eviction.op_metadata import Costs, OpMetadataCache, scratch_name
from memtune.activations.eviction.policy import COOP, DTR, MEGTAICHI, Policy
from memtune.errors import ApplyError
from memtune.memory.ledger import Ledger
from memtune.testing.training import build

CPU = torch.device("cpu")
COSTS = Costs(1e11, 1e10, 1e-6)
POLICIES = {"dtr": DTR, "coop": COOP, "megtaichi": MEGTAICHI}


def online(
    model: nn.Module, optimizer: Any, policy: Policy, budget_bytes: int, freeze_after: int = 0
) -> OnlineRegion:
    policy = replace(policy, in_place=True, forget=True, compacts=True)
    settings = OnlineSettings(policy, budget_bytes, COSTS, freeze_after=freeze_after)
    region = OnlineRegion(model, optimizer, settings, CPU)
    region.install()
    return region


def train(
    name: str, policy: Policy | None, budget_bytes: int, steps: int = 2
) -> tuple[list[Tensor], OnlineRegion | None]:
    workload, model, optimizer = build(ZOO[name])
    region = None if policy is None else online(model, optimizer, policy, budget_bytes)
    return trained_values(workload, model, optimizer, 12, steps, micro_batches=2), region


CASES = [
    ("moe", "dtr"),
    pytest.param("moe", "coop", marks=pytest.mark.slow),
    ("cnn_bn", "megtaichi"),
    ("inplace_views", "dtr"),
    ("lstm", "dtr"),
    ("autocast", "coop"),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("name", "policy"), CASES)
def test_region_trains_bitwise_within_the_budget(name: str, policy: str) -> None:
    plain, _ = train(name, None, 0)
    _, free = train(name, POLICIES[policy], 1 << 40)
    assert free is not None
    assert free.runs.replays == 0
    budget_bytes = free.runs.peak_bytes * 9 // 10
    got, region = train(name, POLICIES[policy], budget_bytes)
    assert region is not None
    assert region.runs.replays > 0
    assert region.runs.peak_bytes <= budget_bytes
    assert same(got, plain)


def test_region_runs_an_lstm_with_varying_lengths() -> None:
    found, budget_bytes = [], 1 << 40
    for _ in range(2):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 64), nn.GELU(), nn.LSTM(64, 32)
        )
        region = online(net, torch.optim.SGD(net.parameters()), DTR, budget_bytes)
        for length in (40, 64, 56):
            net(torch.randn(length, 64, 32))[0].square().sum().backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        assert (region.runs.replays > 0) == (budget_bytes < 1 << 40)
        budget_bytes = region.runs.peak_bytes * 9 // 10
    assert same(*found)


def test_region_runs_instance_norm_bitwise() -> None:
    """InstanceNorm's kernel writes into a copy of its statistics for each sample, which autograd saves and
    sees no write to.
    """
    found = []
    for policy in (None, DTR):
        torch.manual_seed(0)
        norms = [
            nn.Sequential(nn.Linear(32, 32), nn.InstanceNorm1d(4, track_running_stats=True), nn.GELU())
            for _ in range(3)
        ]
        net = nn.Sequential(*norms, nn.Linear(32, 1))
        region = policy and online(net, torch.optim.SGD(net.parameters()), policy, 250_000)
        net(torch.randn(64, 4, 32)).square().sum().backward()
        found.append(
            [p.grad.clone() for p in net.parameters() if p.grad is not None]
            + [b.clone() for b in net.buffers()]
        )
    assert region is not None
    assert region.runs.replays > 0
    assert same(*found)


@pytest.mark.parametrize("inplace", [False, True])
def test_region_runs_rrelu_bitwise(inplace: bool) -> None:
    """RReLU draws its noise into a tensor that autograd saved before.

    Neither is made again by the op that made it empty.
    """
    found, budget_bytes = [], 1 << 40
    for _ in range(2):
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.Linear(32, 32), nn.RReLU(inplace=inplace), nn.GELU(), nn.Softplus())
            for _ in range(4)
        ]
        net = nn.Sequential(*layers)
        region = online(net, torch.optim.SGD(net.parameters()), DTR, budget_bytes)
        for step in range(3):
            torch.manual_seed(step)
            net(torch.randn(128, 32)).square().sum().backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        assert (region.runs.replays > 0) == (budget_bytes < 1 << 40)
        budget_bytes = region.runs.peak_bytes * 9 // 10
    assert same(*found)


def test_region_runs_several_forwards_before_one_backward() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            self.head = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
            out: Tensor = self.head(torch.tanh(y))
            return out

    found, budget_bytes = [], 1 << 40
    for _ in range(2):
        torch.manual_seed(0)
        net = Net()
        region = online(net, torch.optim.SGD(net.parameters()), DTR, budget_bytes)
        (net(torch.randn(128, 64)).sum() * net(torch.randn(128, 64)).sum()).backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
        assert (region.runs.replays > 0) == (budget_bytes < 1 << 40)
        budget_bytes = region.runs.peak_bytes * 97 // 100
    assert same(*found)


def test_impossible_budget_raises_with_the_least_one() -> None:
    with pytest.raises(ApplyError, match="nothing is left to evict") as caught:
        train("moe", DTR, 400_000)
    assert caught.value.code == "MT337"
    assert "a budget of at least" in str(caught.value)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()  # saves what it returns
        z: Tensor = y * 2
        y.add_(1)
        return z


def test_outputs_may_be_written_if_backward_does_not_read_them() -> None:
    """A write raises as in the plain model if backward reads the output."""
    x = torch.randn(8, 4)
    for last, allowed in ((nn.Tanh(), False), (nn.Linear(4, 4), True)):
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), last)
        found = []
        for _ in range(4):  # plain, then under the mode
            out = net(x)
            out /= 2.0
            if allowed:
                out.square().sum().backward()
                found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
            else:
                with pytest.raises(
                    (ApplyError, RuntimeError), match=r"written into|modified by an inplace operation"
                ):
                    out.square().sum().backward()
            net.zero_grad(set_to_none=True)
            if len(found) < 2 and "forward" not in vars(net):
                region = online(net, torch.optim.SGD(net.parameters()), DTR, 1 << 30)
        assert all(same(found[0], each) for each in found)
        assert region.runs.steps == 3 * allowed


@pytest.mark.native_ledger
@pytest.mark.parametrize("keeps", [False, True])
def test_abandoned_forward_frees_its_values(keeps: bool) -> None:
    """Freed without the garbage collector; if another forward waits, at the next op."""
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    region = online(net, torch.optim.SGD(net.parameters()), DTR, 1 << 30)
    x = torch.randn(256, 64)
    gc.collect()
    gc.disable()
    try:
        with Ledger.open(CPU) as ledger:
            kept = net(x) if keeps else None
            before_bytes = ledger.live_bytes()
            for _ in range(4):
                out = net(x).sum()
                assert 4 * x.nbytes < ledger.live_bytes() - before_bytes < 6 * x.nbytes
                del out
                assert len(region._live) == keeps
                if not keeps:
                    assert ledger.live_bytes() == before_bytes
            if kept is not None:
                kept.sum().backward()
    finally:
        gc.enable()
    assert region.runs.steps == keeps


@pytest.mark.parametrize("is_hooked", [False, True])
def test_region_returns_requested_gradients(is_hooked: bool) -> None:
    """Gradients equal the plain model's.

    No other gradient appears, and hooks are called as often.
    """
    found = []
    for decided in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        x, called = torch.randn(4, 8, requires_grad=True), [0]
        first, hook = net[0].weight, lambda grad, called=called: called.__setitem__(0, called[0] + 1)
        if is_hooked:
            net[2].bias.register_hook(hook)
        if decided:
            region = online(net, torch.optim.SGD(net.parameters()), DTR, 1 << 30)
        steps = []
        for _ in range(3):
            steps += [*torch.autograd.grad(net(x).square().sum(), x), *(p.grad for p in net.parameters())]
            if not is_hooked:
                steps += torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
                net(x).square().sum().backward(inputs=[first])
                steps += [x.grad, *(p.grad for p in net.parameters())]
            net(x).square().sum().backward()
            steps += [each.grad.clone() for each in (x, *net.parameters())]
            for each in (x, *net.parameters()):
                each.grad = None
        found.append((steps, called))
    assert region.runs.replays == 0
    assert [each is None for each in found[0][0]] == [each is None for each in found[1][0]]
    assert same(*([each for each in steps if each is not None] for steps, _ in found))
    assert found[0][1] == found[1][1] == [3 * is_hooked]


def test_device_out_of_memory_evicts_more() -> None:
    """An allocation fails once: more is evicted, the op runs, the bits are the same."""

    class Fails(torch.utils._python_dispatch.TorchDispatchMode):
        failed = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.gelu_backward.default and not self.failed:
                self.failed = 1
                raise torch.OutOfMemoryError("no room")
            return func(*args, **(kwargs or {}))

    found, fails = [], Fails()
    for is_online in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())))
        if is_online:
            region = online(net, torch.optim.SGD(net.parameters()), DTR, 1 << 20)
        with fails if is_online else nullcontext():
            net(torch.ones(512, 32)).square().mean().backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert fails.failed
    assert region.runs.steps == 1
    assert same(*found)


def test_write_to_a_saved_tensor_raises() -> None:
    for spoil in (False, True):
        net: nn.Module = nn.Linear(4, 4) if spoil else Writes()
        online(net, torch.optim.SGD(net.parameters()), DTR, 1 << 30)
        x = torch.ones(2, 4)
        y = net(x)
        if spoil:
            x.add_(1)
        with pytest.raises(ApplyError) as caught:
            y.sum().backward()
        assert caught.value.code == "MT326"


def test_missing_elementwise_inputs_are_recomputed_in_parts() -> None:
    """The gate of a gate is recomputed under memory pressure: the value in between never exists in full."""
    policy = replace(DTR, in_place=True, forget=True, neighbours="own", by_staleness=False, parts=4)
    x, weight = torch.randn(64, 64), torch.randn(64, 64)
    with Ledger.open(CPU) as ledger:
        facts = OpMetadataCache(COSTS, {})
        table = OnlineTable(nn.Module(), policy, 11 * x.nbytes // 2, 0, facts)
        with _Mode(table, facts):
            made = x @ weight
            first = nn.functional.leaky_relu(made, 0.1)
            second = nn.functional.leaky_relu(first, 0.2)
            wanted = second.clone()
            kept = table.pack(made), table.pack(second)
            del made, first, second
            others = [wanted @ weight, wanted @ weight]
            table.leave_room(3 * x.nbytes // 2)
            ledger.reset_peak()
            before_bytes = ledger.live_bytes()
            again = table.unpack(kept[1])
    assert [(each.which, each.along) for each in table.replays] == [(2, (1,))]
    assert torch.equal(again, wanted)
    assert 0 < ledger.peak_allocated_bytes() - before_bytes <= 3 * x.nbytes // 2
    assert len(others) == 2


def test_scratch_depends_on_argument_storages() -> None:
    small, large, view = torch.ones(4), torch.ones(8), torch.ones(64)[:4]
    told = {"aten.exp.default": 9, scratch_name("aten.exp.default", [16]): 3}
    facts = OpMetadataCache(COSTS, told, {scratch_name("aten.exp.default", [16]): 100})
    exp = facts.properties_of(torch.ops.aten.exp.default)
    found = [facts.lookup(exp, (each,), {}) for each in (small, large, view)]
    assert [each.scratch_bytes for each in found] == [3, 9, 9]
    assert [each.makes_bytes for each in found] == [100, 32, 16]
    assert facts.lookup(exp, (torch.zeros(4),), {}) is found[0]
    assert facts.lookup(facts.properties_of(torch.ops.aten.log.default), (small,), {}).scratch_bytes == 0
