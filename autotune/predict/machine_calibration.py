"""`memtune doctor --calibrate`: measure this machine's rates and store them for later predictions.

On CPU one thread is measured and the other cores are assumed to be equal, as in `measure`; shared resources
(memory, drives, links) are measured directly. Every figure states how it was measured, or why it could not
be.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from memtune.autotune.predict import context_memory, link_benchmark, op_rates
from memtune.autotune.predict.mechanism_benchmark import measured_costs
from memtune.device import accelerator, backend_of, is_lost, streams
from memtune.errors import EnvironmentFault
from memtune.hardware import (
    Calibration,
    Device,
    Hardware,
    TimedOp,
    calibration_cache,
    clock_of,
    cpu_probe,
    cpu_threads,
    detect,
    usable_cores,
    with_measured,
)
from memtune.memory import ModeLedger, SignatureCollector, WorkspaceTable, cpu_allocator, op_of
from memtune.units import format_bytes

BUDGET_S = 60.0


@dataclass
class _Measurements:
    constants: dict[str, float] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def set(self, name: str, value: float, how: str) -> None:
        self.constants[name], self.how[name] = value, how


def calibrate(
    device: Device, *, tiny: bool = False, say: Callable[[str], None] = lambda text: None
) -> Calibration:
    """Measure this machine for `device`, and the drive of temporary files; store the result. Takes under a
    minute.

    Args:
        device: The device to measure; host rates, drives and links are measured in any case.
        tiny: Use sizes that take a second or two.
        say: Called with a line about each measurement as it begins.

    Raises:
        UsageError: Torch has no device type `device`.
        EnvironmentFault: It has, and sees no such device.
    """
    accelerator.require_present(device, "calibrate with --device cpu")
    # An earlier measurement must not decide this one: `detect` below would read it.
    calibration_cache.forget(device)
    started, found = time.monotonic(), _Measurements()
    on = torch.device(device)
    with torch.random.fork_rng(devices=[]), cpu_threads(1 if device == "cpu" else None):
        say("matrix products and memory")
        _matmuls(found, on, tiny)
        _memory(found, on, tiny)
        say("copies between host and device")
        _copies(found, on, tiny)
        say("ops of every class, at growing sizes")
        base = with_measured(
            detect(device), Calibration(calibration_cache.machine(device), "", found.constants)
        )
        curves = _op_curves(found, base, on, started, tiny)
        say("memtune's own hooks, modes and schedules")
        for name, seconds in measured_costs(on, rounds=2 if tiny else 25).items():
            found.set(name, seconds, "small blocks with and without, in rotation, median")
    say("what kernels allocate beyond their outputs")
    _workspaces(found, on, tiny)
    if device != "cpu":
        say("memory outside torch's allocator")
        _outside(found, on)
    say("optimizer on the host, drive, links between ranks")
    _host_adam(found, tiny)
    _drive(found, Path(tempfile.gettempdir()), 2**20 if tiny else 2**27)
    _links(found, device, 2**16 if tiny else 2**24)
    found.details["seconds"] = round(time.monotonic() - started, 2)
    today = datetime.now(UTC).date().isoformat()
    result = Calibration(
        calibration_cache.machine(device), today, found.constants, found.how, curves, found.details
    )
    calibration_cache.save(device, result)
    return result


def _seconds(run: Callable[[], object], on: torch.device, budget_s: float) -> float:
    """Return the median seconds of `run`, with the device idle before and after."""

    def waited() -> None:
        run()
        streams.synchronize(on)

    return cpu_probe.median_s(waited, budget_s, clock_of(on))


def _matmuls(found: _Measurements, on: torch.device, tiny: bool) -> None:
    """Measure square products by dtype and size; the constant is the best size's rate."""
    on_gpu = on.type != "cpu"
    sizes = (64, 128) if tiny else (1024, 4096, 8192) if on_gpu else (128, 384, 1024)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16} | (
        {"fp16": torch.float16, "tf32": torch.float32} if on_gpu else {}
    )
    # A CPU is measured on one thread, so that other load disturbs it less; products scale with the cores.
    cores = 1 if on_gpu else usable_cores()
    for name, dtype in types.items():
        rates = {}
        settings = accelerator.float32_products()
        # TF32 is a mode of float32 products, not a dtype.
        allowed, settings.allow_tf32 = settings.allow_tf32, name == "tf32"
        try:
            for n in sizes:
                a = torch.ones(n, n, dtype=dtype, device=on)
                # A multiplication and an addition for each of n³ pairs.
                rates[n] = 2 * n**3 / _seconds(lambda a=a: a @ a, on, 0.02 if tiny else 0.3) * cores  # type: ignore[misc]
        finally:
            settings.allow_tf32 = allowed
        how = f"square products of {', '.join(map(str, sizes))}, the best" + (
            "" if on_gpu else f"; one core × {cores}"
        )
        found.set(f"{name}_flops_per_s", max(rates.values()), how)
        found.details[f"matmul_{name}_flops_per_s"] = {str(n): rate for n, rate in rates.items()}
    if on_gpu:
        for name in ("matmul_efficiency", "fp32_matmul_efficiency"):
            found.set(name, 1.0, "the rates are those reached")
    else:
        found.set("fp16_flops_per_s", found.constants["fp32_flops_per_s"], "taken as float32")
        found.set("tf32_flops_per_s", found.constants["fp32_flops_per_s"], "float32")


def _memory(found: _Measurements, on: torch.device, tiny: bool) -> None:
    """Measure a copy's bytes read and written per second; the constant is the largest size's rate."""
    on_gpu = on.type != "cpu"
    sizes = (2**16, 2**18) if tiny else (2**20, 2**26, 2**30) if on_gpu else (2**20, 2**25, 2**27)
    cores = 1 if on_gpu else min(usable_cores(), 4)  # cores beyond these seldom add memory bandwidth
    rates = {}
    for n_bytes in sizes:
        source = torch.zeros(n_bytes // 4, device=on)
        target = torch.zeros_like(source)
        copy = lambda source=source, target=target: target.copy_(source)  # noqa: E731
        # A copy reads and writes each byte.
        rates[n_bytes] = 2 * n_bytes / _seconds(copy, on, 0.02 if tiny else 0.2) * cores
    # Smaller copies are served by caches.
    largest = max(sizes)
    found.set(
        "memory_bytes_per_s",
        rates[largest],
        f"a copy of {largest} bytes, read and written" + ("" if on_gpu else f", × {cores}"),
    )
    found.details["memory_bytes_per_s"] = {str(n_bytes): rate for n_bytes, rate in rates.items()}


def _copies(found: _Measurements, on: torch.device, tiny: bool) -> None:
    """Measure pinned and pageable copies."""
    # On CPU the host tier is the same memory, and a copy takes one thread.
    n_bytes = 2**18 if tiny else 2**27
    budget = 0.02 if tiny else 0.3
    host = torch.zeros(n_bytes // 4)
    if on.type == "cpu":
        rate = n_bytes / _seconds(lambda: torch.empty_like(host).copy_(host), on, budget)
        found.set("host_to_device_bytes_per_s", rate, "a copy by one thread")
        found.set("device_to_host_bytes_per_s", rate, "a copy by one thread")
        return
    there, pinned = torch.zeros_like(host, device=on), host.pin_memory()
    pairs = {"host_to_device": (there, pinned, host), "device_to_host": (pinned, there, there)}
    for name, (target, source, _) in pairs.items():
        rate = n_bytes / _seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True), on, budget)  # type: ignore[misc]
        found.set(f"{name}_bytes_per_s", rate, f"pinned memory, {n_bytes} bytes")
    found.details["pageable_host_to_device_bytes_per_s"] = n_bytes / _seconds(
        lambda: there.copy_(host), on, budget
    )
    found.details["pageable_device_to_host_bytes_per_s"] = n_bytes / _seconds(
        lambda: host.copy_(there), on, budget
    )


def _op_curves(
    found: _Measurements, hardware: Hardware, on: torch.device, started: float, tiny: bool
) -> dict[str, calibration_cache.Curve]:
    """Return curves by op class; the cost of an op without its kernel becomes `launch_s`."""
    on_gpu = on.type != "cpu"
    part = 1 if on_gpu else usable_cores()
    rates = {
        name: getattr(hardware, name) / part
        for name in ("fp32_flops_per_s", "bf16_flops_per_s", "fp16_flops_per_s")
    }
    # The probes run on one thread, so they are held against the rates of one.
    memory = hardware.memory_bytes_per_s / (1 if on_gpu else min(part, 4))
    one = replace(hardware, memory_bytes_per_s=memory, **rates)
    observed: list[TimedOp] = []
    overheads: list[float] = []
    floor = op_rates.floor_s(on)
    for probe in op_rates.probes(0 if tiny else 3 if on_gpu else 2):
        if overheads and time.monotonic() - started > BUDGET_S * 0.5:
            found.details["probes"] = "stopped early: time was up"
            break
        try:
            ops, overhead_s = op_rates.observe(probe, on, repeats=2 if tiny else 7, floor=floor)
        except RuntimeError as error:
            if is_lost(error):
                raise
            name = type(probe.model).__name__.lstrip("_")
            found.details[f"probe {name}"] = f"not measured: {str(error).strip().splitlines()[0][:200]}"
            continue
        observed += ops
        # The step of a model with almost no compute is the time outside of kernels.
        if not probe.size:
            overheads.append(overhead_s)
    # On CPU the first model's overhead counts: its kernels are the smallest share of the step.
    launch = _launch_s(on, tiny) if on_gpu else overheads[0]
    if launch > 0:
        how = "a queue of tiny ops" if on_gpu else "time of small training steps outside of kernels, per op"
        found.set("launch_s", launch, how)
    found.details["ops_observed"] = len(observed)
    return op_rates.curves(observed, one)


def _workspaces(found: _Measurements, on: torch.device, tiny: bool) -> None:
    """Measure kernels' scratch for small models of every op class, into the table of recordings."""
    # Signatures name no device, so the ops are collected on CPU for both. A recording measures missing ones.
    reason = cpu_allocator.available() if on.type == "cpu" else None
    if reason is not None:
        found.details["workspaces"] = f"not measured: {reason.what}"
        return
    seen = SignatureCollector()
    for probe in op_rates.probes(0 if tiny else 2):
        with ModeLedger(workspace=seen), torch.enable_grad():
            probe.model.train()(torch.rand(probe.shape)).square().mean().backward()
    table = WorkspaceTable.cached(on, threads=usable_cores())
    try:
        table.fill_in_child(seen.keys, on)
    except EnvironmentFault as error:
        found.details["workspaces"] = f"not measured: {error.what} {error.evidence}"
        return
    table.save()
    measured_here = {key: table.workspace_bytes(key) for key in seen.keys if key in table.entries}
    key, largest = max(measured_here.items(), key=lambda row: row[1], default=("", 0))
    some = sum(n_bytes > 0 for n_bytes in measured_here.values())
    most = f", at most {format_bytes(largest)} in {op_of(key)}" if largest else ""
    found.details["workspaces"] = f"{some} of {len(measured_here)} ops allocate beyond their outputs{most}"
    found.details["workspace_bytes"] = largest


def _launch_s(on: torch.device, tiny: bool) -> float:
    value = torch.ones(16, device=on)
    count = 50 if tiny else 500

    def queue() -> None:
        for _ in range(count):
            # So small that the launch is all the time there is.
            value.add_(1.0)

    return _seconds(queue, on, 0.05 if tiny else 0.3) / count


def _host_adam(found: _Measurements, tiny: bool) -> None:
    """Measure torch's fused AdamW on host memory, all threads, in bytes read and written per second."""
    count = 2**14 if tiny else 2**24
    parameter = torch.zeros(count, requires_grad=True)
    parameter.grad = torch.ones(count)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    # The first step makes the state.
    optimizer.step()
    seconds = cpu_probe.best_s(optimizer.step, 0.02 if tiny else 0.5)
    found.set(
        "host_adam_bytes_per_s",
        # Reads weight, gradient and two moments, writes weight and moments, in float32.
        7 * 4 * count / seconds,
        f"torch's fused AdamW over {count} fp32 parameters, all threads",
    )


def _drive(found: _Measurements, place: Path, n_bytes: int) -> None:
    """Measure writing and reading a file with O_DIRECT; without it, with fsync and through the page cache."""
    block = mmap.mmap(-1, min(n_bytes, 2**22))  # page-aligned, as O_DIRECT wants it
    path = place / f"memtune-drive-{os.getpid()}"
    direct = getattr(os, "O_DIRECT", 0)
    try:
        try:
            write_s, read_s = _write_and_read(path, block, n_bytes, direct)
            how = f"{n_bytes} bytes with O_DIRECT in {place}"
        except OSError:
            write_s, read_s = _write_and_read(path, block, n_bytes, 0)
            how = (
                f"{n_bytes} bytes in {place}, synchronised, without O_DIRECT: reads may come from the page"
                " cache"
            )
        found.set("ssd_write_bytes_per_s", n_bytes / write_s, how)
        found.set("ssd_read_bytes_per_s", n_bytes / read_s, how)
    except OSError as error:
        found.details["drive"] = f"not measured: {error}"
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        block.close()


def _write_and_read(path: Path, block: mmap.mmap, n_bytes: int, direct: int) -> tuple[float, float]:
    count = n_bytes // len(block)
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | direct, 0o600)
    try:
        start = time.perf_counter()
        for _ in range(count):
            os.write(file, block)
        # Without O_DIRECT writes are in the page cache until then.
        os.fsync(file)
        write_s = time.perf_counter() - start
    finally:
        os.close(file)
    file = os.open(path, os.O_RDONLY | direct)
    try:
        start = time.perf_counter()
        for _ in range(count):
            os.readv(file, [block])
        return write_s, time.perf_counter() - start
    finally:
        os.close(file)


def _outside(found: _Measurements, on: torch.device) -> None:
    try:
        held = context_memory.measure(on)
    except EnvironmentFault as error:
        found.details["context"] = f"not measured: {error.what}"
        return
    how = "free memory of the device before and after another process"
    found.set("context_bytes", held.context_bytes, f"{how} multiplied matrices")
    if held.cudnn_bytes:
        found.set("cudnn_bytes", held.cudnn_bytes, f"{how} ran a convolution")


def _links(found: _Measurements, device: Device, large_bytes: int) -> None:
    """Measure an all-reduce of two ranks: on two devices, or on CPU."""
    if device != "cpu" and accelerator.count() < 2:
        found.details["links"] = "not measured: one GPU"
        return
    backend = backend_of(device)
    try:
        rate, step_s = link_benchmark.measure(device, large_bytes=large_bytes)
    except RuntimeError as error:
        found.details["links"] = f"not measured: {error}"
        return
    found.set("intra_link_bytes_per_s", rate, f"all-reduce of two ranks over {backend}, {large_bytes} bytes")
    found.set("intra_link_latency_s", step_s, f"all-reduce of two ranks over {backend}, 1 KiB")
