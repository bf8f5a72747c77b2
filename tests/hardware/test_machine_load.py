"""Load by other processes, and rates that are only kept and believed on a quiet machine."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_cpu import CPU
from support.gloo import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from memtune.hardware import cpu_probe
from memtune.hardware.cpu_cores import usable_cores
from memtune.hardware.machine_load import LoadMeter, reference_s
from memtune.hardware.rate_probe import measure_rates


def test_load_meter_sees_other_process_and_not_this_one() -> None:
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        meter = LoadMeter()
        time.sleep(0.6)
        with_other = meter.others()
    finally:
        other.kill()
        other.wait()
    assert with_other > 0.3 / usable_cores()


def test_load_meter_counts_equal_ranks_as_own(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(100.0, 10.0, 0.0), (108.0, 12.0, 4.0)])
    monkeypatch.setattr(LoadMeter, "_now", staticmethod(lambda: next(times)))
    monkeypatch.setattr("memtune.hardware.machine_load.usable_cores", lambda: 4)
    assert LoadMeter(2).others() == pytest.approx((8 - 2 * 2) / (4 * 4))


def test_mean_over_unequal_ranks_is_the_load_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank computes for 3 of 4 seconds and one for 1, and nothing else runs."""
    monkeypatch.setattr("memtune.hardware.machine_load.usable_cores", lambda: 4)
    loads = []
    for own_s in (3.0, 1.0):
        times = iter([(0.0, 0.0, 0.0), (4.0, own_s, 4.0)])
        monkeypatch.setattr(LoadMeter, "_now", staticmethod(lambda times=times: next(times)))
        loads.append(LoadMeter(2).others())
    assert loads == pytest.approx([-0.125, 0.125])


def test_load_is_zero_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadMeter, "_now", staticmethod(lambda: None))
    assert LoadMeter().others() == 0


def test_reference_op_takes_time() -> None:
    assert reference_s(torch.device("cpu")) > 0


def keep(rates: cpu_probe.CpuRates) -> Path:
    path = cpu_probe.save(rates)
    cpu_probe.cpu.cache_clear()
    return path


def test_slow_kept_rates_are_measured_again(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadMeter, "others", lambda self: 0.0)
    true = cpu_probe.cpu()
    keep(replace(true, fp32_flops_per_s=true.fp32_flops_per_s / 14))  # taken while something else ran
    found = cpu_probe.cpu()
    assert found.fp32_flops_per_s > true.fp32_flops_per_s / 5
    (file,) = empty_cache.iterdir()
    assert json.loads(file.read_text()) == asdict(found)


def test_rates_of_busy_machine_are_not_kept(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadMeter, "others", lambda self: 0.5)
    cpu_probe.cpu()
    assert list(empty_cache.iterdir()) == []


def test_given_rates_are_neither_checked_nor_replaced(empty_cache: Path) -> None:
    rates = replace(cpu_probe.cpu(), fp32_flops_per_s=1e6, is_given=True)
    keep(rates)
    assert cpu_probe.cpu() == rates


def test_rates_of_two_ranks_are_constants_of_their_links() -> None:
    found = run_ranks(_rates_of_two, 2)
    links = {name for name in found[0] if "link" in name or "rounds" in name}
    assert links == {
        "intra_link_latency_s",
        "intra_link_bytes_per_s",
        "all_gather_rounds",
        "reduce_scatter_rounds",
    }
    assert {name: found[1][name] for name in links} == pytest.approx({name: found[0][name] for name in links})
    replace(CPU, **found[0])  # all are fields of Hardware
    assert 0 < found[0]["intra_link_latency_s"] < 1
    assert min(found[0][name] for name in links if "rounds" in name) > 0


def _rates_of_two() -> dict[str, float]:
    importlib.import_module("memtune.runtime.seam")  # registers the collectives, as every rank does
    return measure_rates(torch.device("cpu"), local_ranks=2)


def test_rates_of_one_rank_are_those_of_the_host() -> None:
    found = measure_rates(torch.device("cpu"), local_ranks=1)
    assert set(found) == {
        "host_to_device_bytes_per_s",
        "device_to_host_bytes_per_s",
        "host_adam_bytes_per_s",
    }
    assert all(1e7 < rate < 1e13 for rate in found.values())


def test_rates_are_those_of_memory_and_not_of_caches() -> None:
    """A server's last-level cache holds copies of tens of MiB, and a training step evicts them in between."""
    ran: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            name = func.overloadpacket.__name__
            if name in ("copy_", "_fused_adamw_"):
                ran.append(name)
            elif name == "add_" and args[0].nbytes >= 2**27:
                ran.append("evict")
            return func(*args, **(kwargs or {}))

    with Recorder():
        measure_rates(torch.device("cpu"), local_ranks=1)
    ran.remove("_fused_adamw_")  # the first one makes the state and is not timed
    assert ran[::2] == ["evict"] * (len(ran) // 2)
    assert {"copy_", "_fused_adamw_"} == set(ran[1::2])
