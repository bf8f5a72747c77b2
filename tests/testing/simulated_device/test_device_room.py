"""`memtune.device` and the copies of `runtime.transfer` on an accelerator that is no GPU."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.simulated_ranks import CAPACITY_BYTES
from torch import nn

import memtune.activations.offload.compression
import memtune.parallel.collectives.quantization  # noqa: F401  (defines torch.ops.memtune.quantise_)
from memtune import apply
from memtune.device import (
    Capability,
    accelerator,
    is_out_of_memory,
    memory_statistics,
    platform_of,
    streams,
)
from memtune.errors import ApplyError, UsageError
from memtune.hardware import detect
from memtune.memory import Ledger
from memtune.runtime import HOST, transfer

pytestmark = pytest.mark.device
# The device type is called `sim` once the devices are started, which is after tests are collected.
HERE, THERE = (torch.device(torch._C._get_privateuse1_backend_name(), index) for index in (0, 1))


@pytest.fixture(autouse=True)
def own_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(transfer, "_pending", {})
    monkeypatch.setattr(transfer, "_prefetched", {})
    yield
    streams.synchronize(HERE)


def test_accelerator_is_found_and_describes_itself() -> None:
    assert (accelerator.device_type(), accelerator.count(), accelerator.is_started()) == ("sim", 2, True)
    assert accelerator.types() == ("cpu", "sim")
    assert platform_of(HERE) is platform_of("sim")
    assert {Capability.STREAMS, Capability.PINNED, Capability.LIMIT} <= platform_of("sim").capabilities
    assert Capability.INDUCTOR in platform_of("sim").lacks
    found = detect("sim")
    assert (found.device, found.memory_bytes, found.gpus_per_node) == ("sim", CAPACITY_BYTES, 2)
    with pytest.raises(UsageError, match="has no device type simx"):
        platform_of("simx")


@pytest.mark.parametrize("device", [HERE, THERE], ids=str)
def test_on_is_nested_and_restores_stream_and_device(device: torch.device) -> None:
    side, before = streams.new_stream(device), streams.current()
    assert side is not None
    with streams.on(side):
        assert streams.current() == side
        with streams.on(side):
            assert streams.current().device_index == device.index
        assert streams.current() == side
    assert streams.current() == before


def test_copies_between_tiers_arrive_in_order() -> None:
    """With `deferred` copies a wait that is missing, or on the wrong stream, reads old bytes."""
    values = torch.randn(1 << 14)
    x = values.to(HERE)
    host = transfer.to_host(x)
    assert host.is_pinned()
    transfer.finish(host)
    assert torch.equal(host, values)
    with transfer.prefetching_separately(HERE):
        separate = transfer.to_device(host, HERE)
    transfer.wait_tensor(separate)
    assert torch.equal((2 * separate).cpu(), 2 * values)  # before another wait includes this copy
    with transfer.prefetching(HERE):
        together = transfer.to_device(host, HERE)
    transfer.wait_prefetched(HERE)
    tail = torch.ones(3, device=HERE)
    joined = transfer.to_device_with_tail(host, tail, HERE)
    assert torch.equal(together.cpu(), values)
    assert torch.equal(joined.cpu(), torch.cat([values, torch.ones(3)]))
    done = transfer.issued(HERE)
    assert done is not None
    done.synchronize()


def test_generators_repeat_and_are_restored() -> None:
    state = accelerator.get_rng_state(HERE)
    first = torch.rand(4, device=HERE).cpu()
    accelerator.set_rng_state(HERE, state)
    with accelerator.fork_rng(HERE):
        assert torch.equal(torch.rand(4, device=HERE).cpu(), first)
    assert torch.equal(torch.rand(4, device=HERE).cpu(), first)
    assert accelerator.started_devices() == [HERE, THERE]


def test_ledger_counts_device_and_pinned_bytes_and_has_a_budget() -> None:
    torch.sim.empty_cache()  # a budget limits segments that are made from now on
    with Ledger.open("sim", budget_bytes=8 << 20) as ledger:
        before = ledger.live_bytes()
        held = torch.empty(1 << 20, dtype=torch.uint8, device="sim")
        assert ledger.live_bytes() - before == held.nbytes
        assert ledger.peak_allocated_bytes() >= ledger.live_bytes()
        assert ledger.peak_reserved_bytes() >= ledger.peak_allocated_bytes()
        assert ledger.live_bytes(HOST) >= 0
        with pytest.raises(RuntimeError) as caught:
            torch.empty(16 << 20, dtype=torch.uint8, device="sim")
        assert is_out_of_memory(caught.value)
    torch.empty(16 << 20, dtype=torch.uint8, device="sim")
    assert memory_statistics.total_bytes(HERE) == CAPACITY_BYTES


def test_bad_placement_is_one_message() -> None:
    model = nn.Sequential(nn.Linear(4, 4).to("sim"), nn.Linear(4, 4))
    with pytest.raises(ApplyError, match="on 2 devices: sim:0 and cpu") as caught:
        apply(model, torch.optim.SGD(model.parameters(), 0.1), {"settings": {}})
    assert caught.value.code == "MT134"
    model = model.to("sim")
    constant = torch.ones(4)

    def loss(m: nn.Module, x: Any) -> torch.Tensor:
        return (m(x) * constant).sum()  # type: ignore[no-any-return]

    tuned = apply(model, torch.optim.SGD(model.parameters(), 0.1), {"settings": {}}, loss=loss)
    with pytest.raises(ApplyError, match="on another device than the model's, sim:0") as caught:
        tuned.step([torch.ones(2, 4)])
    assert caught.value.code == "MT135"


def test_triton_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, where the addresses of another one's tensors mean nothing."""
    launched: list[int] = []

    def kernel(*_: Any) -> None:
        launched.append(torch.accelerator.current_device_index())

    names = ("compress_", "decompress_", "quantise_", "dequantise_")
    kernels = SimpleNamespace(**dict.fromkeys(names, kernel))
    for module in ("activations.offload.compression_triton", "parallel.collectives.quantization_triton"):
        monkeypatch.setitem(sys.modules, f"memtune.{module}", kernels)
    monkeypatch.setattr(accelerator, "runs_triton", lambda device: True)
    x = torch.ones(512, device=THERE)
    packed = torch.ops.memtune.compress(x, 8, 256, 0)
    torch.ops.memtune.decompress(packed, 512, torch.float32, 8, 256)
    message = torch.empty(520, dtype=torch.uint8, device=THERE)
    torch.ops.memtune.quantise_(message, x, None, [512], 8, 256, 1)
    torch.ops.memtune.dequantise_(x, message, [512], 8, 256, 1, 1.0)
    assert launched == [1] * 4
    assert torch.accelerator.current_device_index() == 0


def _use(answer: Connection) -> None:
    torch.manual_seed(0)  # does not touch the device
    try:
        torch.ones(1, device=HERE)
    except RuntimeError as error:
        answer.send(str(error))
    answer.close()


def test_forked_process_cannot_use_the_device() -> None:
    """As with CUDA: a driver that a process has started does not work in its forks."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_use, args=(theirs,))
    process.start()
    assert ours.poll(30)
    assert "in a forked process" in ours.recv()
    process.join()
