"""The mode ledger against known bytes and the native ledger, and the common interface."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

import memtune.runtime.seam
from memtune.memory import cpu_allocator
from memtune.memory.dispatch_ledger import ModeLedger
from memtune.memory.ledger import Ledger
from memtune.program.step import Kind
from memtune.runtime import memory_tiers
from memtune.runtime.memory_tiers import tier, tier_of
from memtune.runtime.training_step import train_step
from memtune.workload.workload import Workload

CPU = torch.device("cpu")
ZOO = Path(__file__).parents[1] / "zoo"
needs_shim = pytest.mark.native_ledger


@pytest.fixture(autouse=True)
def _nothing_left_behind(one_thread: None) -> None:
    gc.collect()


def mlp() -> tuple[nn.Module, Optimizer]:
    """Two linear layers without bias, 10 → 20 → 5: 300 weights, 1,200 bytes; a buffer of 12 bytes."""
    model = nn.Sequential(nn.Linear(10, 20, bias=False), nn.ReLU(), nn.Linear(20, 5, bias=False))
    model.register_buffer("scale", torch.ones(3))
    return model, AdamW(model.parameters(), foreach=False)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


WEIGHTS, STATE = 4 * 300, 2 * 4 * 300 + 2 * 4  # AdamW: two moments and a step count per parameter


# -- kinds ---------------------------------------------------------------------------------------------------


def test_breakdown_separates_kinds() -> None:
    model, optimizer = mlp()
    batch = torch.randn(8, 10)
    ledger = ModeLedger()
    ledger.track(model, optimizer)
    ledger.label(batch, Kind.BATCH)
    with ledger:
        loss = mean_square(model, batch)
        # autograd keeps relu's output (8 × 20), the last output (8 × 5) and the scalar
        assert ledger.breakdown() == {
            Kind.PARAMETER: WEIGHTS,
            Kind.BUFFER: 12,
            Kind.BATCH: 320,
            Kind.TEMPORARY: 4 * (8 * 20 + 8 * 5 + 1),
        }
        loss.backward()
        assert ledger.breakdown()[Kind.GRADIENT] == WEIGHTS
        del loss
        optimizer.step()
        assert ledger.breakdown() == {
            Kind.PARAMETER: WEIGHTS,
            Kind.GRADIENT: WEIGHTS,
            Kind.OPTIMIZER: STATE,
            Kind.BUFFER: 12,
            Kind.BATCH: 320,
        }
        optimizer.zero_grad()
        assert Kind.GRADIENT not in ledger.breakdown()
    ledger.close()
    assert ledger.live_bytes() == WEIGHTS + STATE + 12 + 320


def test_peak_breakdown_includes_freed_gradients() -> None:
    model, optimizer = mlp()
    batch = torch.randn(8, 10)
    ledger = ModeLedger(keep_timeline=True)
    ledger.track(model, optimizer)
    with ledger:
        train_step(model, optimizer, mean_square, [batch], CPU)
        ledger.reset_peak()
        train_step(model, optimizer, mean_square, [batch], CPU)
    kinds = ledger.peak_breakdown()
    assert sum(kinds.values()) == ledger.peak_bytes() == max(live for _, live in ledger.timeline)
    assert (kinds[Kind.PARAMETER], kinds[Kind.OPTIMIZER], kinds[Kind.GRADIENT]) == (WEIGHTS, STATE, WEIGHTS)
    assert ledger.peak_op() in {op for op, _ in ledger.timeline}
    ledger.close()


def test_watch_finds_existing_gradients() -> None:
    model, _ = mlp()
    mean_square(model, torch.randn(8, 10)).backward()
    ledger = ModeLedger()
    ledger.track(model)
    assert ledger.breakdown()[Kind.GRADIENT] == WEIGHTS
    ledger.close()


def test_close_removes_hooks() -> None:
    model, optimizer = mlp()
    ledger = ModeLedger()
    ledger.track(model, optimizer)
    parameter = next(model.parameters())
    assert parameter._post_accumulate_grad_hooks
    ledger.close()
    assert not parameter._post_accumulate_grad_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


# -- against the native ledger, and on fake tensors ----------------------------------------------------------


@needs_shim
@pytest.mark.parametrize("name", ["gpt", "lora", "tied"])
def test_mode_ledger_equals_native_without_workspace(name: str) -> None:
    cpu_allocator.install()
    base = cpu_allocator.live_bytes()
    workload = Workload.load(ZOO / f"{name}.py")
    model = workload.build_model()
    optimizer = workload.make_optimizer(model)
    with tier("host"):
        batch = workload.make_batch(4)
    ledger = ModeLedger()
    ledger.track(model, optimizer)
    with ledger:
        for _ in range(2):
            train_step(model, optimizer, workload.loss, [batch], CPU)
        ledger.reset_peak()
        cpu_allocator.reset_peak()
        train_step(model, optimizer, workload.loss, [batch], CPU)
    assert ledger.live_bytes() == cpu_allocator.live_bytes() - base
    assert ledger.peak_bytes() == cpu_allocator.peak_bytes() - base
    ledger.close()


def test_mode_ledger_is_equal_on_fake_tensors() -> None:
    def peak() -> tuple[int, str, dict[Kind, int]]:
        model, optimizer = mlp()
        batch = torch.randn(8, 10)
        ledger = ModeLedger()
        ledger.track(model, optimizer)
        ledger.label(batch, Kind.BATCH)
        with ledger:
            for _ in range(2):
                ledger.reset_peak()
                train_step(model, optimizer, mean_square, [batch], CPU)
        ledger.close()
        return ledger.peak_bytes(), ledger.peak_op(), ledger.peak_breakdown()

    real = peak()
    with FakeTensorMode():
        assert peak() == real


@pytest.fixture
def two_ranks() -> Iterator[DeviceMesh]:
    """This process as rank 0 of a fake process group of two."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@needs_shim
@pytest.mark.parametrize("reshard", [True, False])
def test_mode_ledger_counts_fsdp2_resizes_and_local_shapes(reshard: bool, two_ranks: DeviceMesh) -> None:
    cpu_allocator.install()
    gc.collect()
    base = cpu_allocator.live_bytes()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])
    shard_bytes = 4 * 4 * (64 * 64 + 64) // 2
    for block in [*model, model]:
        fully_shard(block, mesh=two_ranks, reshard_after_forward=reshard)
    optimizer = AdamW(model.parameters(), foreach=False)
    batch = torch.randn(4, 64)
    ledger = ModeLedger()
    ledger.track(model, optimizer)
    ledger.label(batch, Kind.BATCH)
    assert ledger.live_bytes() == shard_bytes + batch.nbytes
    with ledger:
        for _ in range(2):
            ledger.reset_peak()
            cpu_allocator.reset_peak()
            loss = mean_square(model, batch)
            loss.backward()
            assert ledger.breakdown()[Kind.GRADIENT] == shard_bytes
            del loss
            optimizer.step()
            optimizer.zero_grad()
    assert ledger.live_bytes() == cpu_allocator.live_bytes() - base
    assert ledger.peak_bytes() == cpu_allocator.peak_bytes() - base
    assert ledger.peak_breakdown()[Kind.PARAMETER] == shard_bytes
    ledger.close()


def test_mode_ledger_counts_temporaries_of_dtensor_ops(two_ranks: DeviceMesh) -> None:
    sharded = DTensor.from_local(torch.ones(4, 8), two_ranks, [Shard(1)])
    ledger = ModeLedger(keep_timeline=True)
    with ledger:
        torch.softmax(sharded, dim=1)  # needs whole rows: DTensor gathers them first
    assert any("all_gather" in op for op, _ in ledger.timeline)


# -- storages and tiers --------------------------------------------------------------------------------------


def test_mode_ledger_counts_resizes_but_no_views() -> None:
    ledger = ModeLedger()
    with ledger:
        block = torch.empty(100)
        half = block[:50]
        assert ledger.live_bytes() == 400
        del block
        assert ledger.live_bytes() == 400
        half.untyped_storage().resize_(0)
        assert ledger.live_bytes() == 0
        half.untyped_storage().resize_(200)
        assert (ledger.live_bytes(), ledger.peak_bytes()) == (200, 400)
        grown = torch.empty(10)
        grown.resize_(30)
        assert ledger.live_bytes() == 320
    del half, grown
    assert ledger.live_bytes() == 0


def test_exit_restores_resize() -> None:
    before = torch.UntypedStorage.resize_
    with ModeLedger():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before


@pytest.mark.parametrize("fake", [False, True])
def test_mode_ledger_counts_tiers_separately(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.no_grad(), ModeLedger() as ledger:
        here = torch.empty(10)
        with tier("host"):
            there = torch.empty(100)
        moved = torch.ops.memtune.to_host(here)
        assert [tier_of(x) for x in (here, there, moved)] == ["device", "host", "host"]
        assert (ledger.live_bytes(), ledger.live_bytes("host")) == (40, 440)
        assert ledger.peak_breakdown("host") == {Kind.TEMPORARY: 440}
        del there
        assert (ledger.live_bytes("host"), ledger.peak_bytes("host")) == (40, 440)
    assert memtune.runtime.seam.SEAM


def test_tier_mark_is_removed_with_its_storage() -> None:
    before = dict(memory_tiers._marked)
    tensor = torch.empty(4)
    memory_tiers.mark(tensor, "ssd")
    assert tier_of(tensor[1:]) == "ssd"
    memory_tiers.mark(tensor, "host")
    assert tier_of(tensor) == "host"
    del tensor
    assert memory_tiers._marked == before


def test_unknown_tier_is_rejected() -> None:
    with pytest.raises(ValueError, match="tier must be one of device, host, ssd"), tier("gpu"):  # type: ignore[arg-type]
        pass
    with pytest.raises(KeyError), tier("host"):
        raise KeyError
    assert memory_tiers.current_tier() == "device"


# -- budget --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fake", [False, True])
def test_budget_error_has_op_request_and_kinds(fake: bool) -> None:
    with FakeTensorMode() if fake else torch.enable_grad():
        model, optimizer = mlp()
        batch = torch.randn(8, 10)
        ledger = ModeLedger()
        ledger.track(model, optimizer)
        ledger.label(batch, Kind.BATCH)
        live = ledger.live_bytes()
        ledger.set_budget(live + 1000)
        with ledger:
            with pytest.raises(torch.OutOfMemoryError) as caught:
                model(batch)  # 640 bytes for the first layer fit, 640 for relu do not
            message = str(caught.value)
            assert (
                f"out of memory in aten.relu.default: it asks for 640 bytes, but {live + 640} of the"
                f" {live + 1000}" in message
            )
            assert f"parameter {WEIGHTS}, buffer 12, batch 320, temporary 1280" in message
            del caught
            assert ledger.live_bytes() == live
            assert ledger.peak_bytes() == live + 640
            ledger.set_budget(live + 1280)
            assert model(batch).shape == (8, 5)


def test_resize_over_budget_is_undone() -> None:
    with ModeLedger() as ledger:
        block = torch.empty(10)
        ledger.set_budget(60)
        with pytest.raises(
            torch.OutOfMemoryError, match=r"UntypedStorage.resize_: it asks for 40 bytes, but 40 of the 60"
        ):
            block.untyped_storage().resize_(80)
        assert (block.untyped_storage().nbytes(), ledger.live_bytes()) == (40, 40)


# -- one interface -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counter", [pytest.param("shim", marks=needs_shim), "mode"])
def test_ledger_interface_is_equal_for_both_counters(counter: str) -> None:
    with Ledger.open("cpu", counter=counter) as ledger:  # type: ignore[arg-type]
        base = ledger.live_bytes()
        model, optimizer = mlp()
        ledger.track(model, optimizer)
        batch = torch.randn(8, 10)
        train_step(model, optimizer, mean_square, [batch], CPU)
        ledger.reset_peak()
        held = {Kind.PARAMETER: WEIGHTS, Kind.BUFFER: 12, Kind.OPTIMIZER: STATE}
        found = ledger.breakdown()
        assert {kind: found[kind] for kind in held} == held
        assert sum(found.values()) == ledger.live_bytes()
        assert ledger.live_bytes() - base == sum(held.values()) + batch.nbytes
        train_step(model, optimizer, mean_square, [batch], CPU)
        peak = ledger.peak_allocated_bytes()
        assert sum(ledger.peak_breakdown().values()) == peak == ledger.peak_reserved_bytes()
        assert peak - base > sum(held.values()) + batch.nbytes + WEIGHTS


@pytest.mark.parametrize("counter", [pytest.param("shim", marks=needs_shim), "mode"])
def test_budget_ends_with_the_ledger(counter: str) -> None:
    with Ledger.open("cpu", counter=counter) as probe:  # type: ignore[arg-type]
        live = probe.live_bytes()
    with Ledger.open("cpu", budget_bytes=live + 400, counter=counter) as ledger:  # type: ignore[arg-type]
        fits = torch.ones(100)
        with pytest.raises(torch.OutOfMemoryError, match="memtune: out of memory in aten"):
            fits + fits
        assert ledger.live_bytes() == live + 400
    assert (fits + fits).sum() == 200


def test_ledger_without_compiler_uses_dispatch_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = cpu_allocator.EnvironmentFault("no C++ compiler was found")
    monkeypatch.setattr(cpu_allocator, "available", lambda: reason)
    with Ledger.open("cpu") as ledger:
        assert not ledger.counts_scratch
        block = torch.empty(10)
        assert ledger.live_bytes() == block.nbytes


@pytest.mark.gpu
def test_ledger_on_device(device: str) -> None:
    with Ledger.open(device, budget_bytes=2**30) as ledger:
        ledger.reset_peak()
        before = ledger.live_bytes()
        block = torch.empty(2**20, dtype=torch.uint8, device=device)
        assert ledger.live_bytes() - before == block.nbytes
        assert ledger.peak_reserved_bytes() >= ledger.peak_allocated_bytes() == before + 2**20
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**31, dtype=torch.uint8, device=device)
        assert ledger.breakdown()[Kind.TEMPORARY] == ledger.live_bytes()
