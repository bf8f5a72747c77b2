"""Quick measurement of this machine's CPU: rates of matrix products and memory, and the time of a small op.

One core is measured, and the others are assumed equal: a second thread would measure other processes on the
machine, too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import nn

from memtune.hardware.cpu_cores import cpu_threads, usable_cores
from memtune.hardware.machine_load import BUSY, LoadMeter

_MEMORY_CORES = 4  # cores beyond these seldom add memory bandwidth
_DRIFT = 1.3
"""Factor between kept and probed rate from which the rates are measured again."""


@dataclass(frozen=True)
class CpuRates:
    """Measured rates of all cores together."""

    title: str
    cores: int
    memory_bytes: int
    fp32_flops_per_s: float
    bf16_flops_per_s: float
    memory_bytes_per_s: float
    op_s: float
    measured_s: float
    is_given: bool = False
    """The rates are constants, not measurements: they are neither checked nor replaced."""


def host_memory_bytes() -> int:
    """Return the physical memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def cpu() -> CpuRates:
    """Return this machine's rates: those kept on disk if a quick probe confirms them, else measured."""
    # A measurement takes under half a second. It is kept unless other processes used the machine meanwhile.
    kept = _kept()
    if kept is not None and (kept.is_given or _confirmed(kept)):
        return kept
    load = LoadMeter()
    rates = _measure()
    is_busy = load.others() > BUSY
    if kept is not None and is_busy:
        # Of two doubtful measurements the faster one: others only make a machine slower.
        return max(kept, rates, key=lambda each: each.fp32_flops_per_s)
    if not is_busy:
        with contextlib.suppress(OSError):  # without a cache the next process measures again
            save(rates)
    return rates


def _kept() -> CpuRates | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        kept = CpuRates(**json.loads(_cache_file().read_text()))
        if all(
            isinstance(getattr(kept, each.name), str if each.name == "title" else (int, float))
            for each in fields(kept)
        ):
            return kept
    return None


def _confirmed(kept: CpuRates) -> bool:
    """Return whether matrix products now run at about the kept rate; takes some 20 ms."""
    # Much faster: the kept rates were measured while the machine was busy. Much slower: it is busy now, or
    # has changed; the measurement that follows decides.
    with cpu_threads(1), torch.random.fork_rng(devices=[]):
        # One core only, like the kept measurement.
        now = _matmul_flops_per_s(torch.float32, budget_s=0.015) * usable_cores()
    return 1 / _DRIFT < now / kept.fp32_flops_per_s < _DRIFT


def save(rates: CpuRates) -> Path:
    """Save `rates` for this machine in the cache directory, where `cpu` reads them; return the file.

    Raises:
        OSError: The file cannot be written.
    """
    file = _cache_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(rates)))
    # Atomic: several trials may start at once.
    partial.replace(file)
    return file


def cache_dir() -> Path:
    """Return the directory of measurements: MEMTUNE_CACHE, else `memtune` in the user's cache directory."""
    shared = os.environ.get("XDG_CACHE_HOME")
    return Path(
        os.environ.get("MEMTUNE_CACHE")
        or str((Path(shared) if shared else Path.home() / ".cache") / "memtune")
    )


def _cache_file() -> Path:
    key = f"{title()}|{usable_cores()}|{torch.__version__}|4"
    return cache_dir() / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def title() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def best_s(run: Callable[[], object], budget_s: float) -> float:
    """Return the shortest time of as many runs as fit into `budget_s`, at least two."""
    # The minimum, since other processes only make runs slower.
    run()
    best, stop = float("inf"), time.perf_counter() + budget_s
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > stop:
            return best


def _measure() -> CpuRates:
    began, n_cores = time.perf_counter(), usable_cores()
    with cpu_threads(1):
        with torch.random.fork_rng(devices=[]):
            flops = {dtype: _matmul_flops_per_s(dtype) for dtype in (torch.float32, torch.bfloat16)}
        source = torch.zeros(8 * 2**20)  # beyond most caches
        target = torch.zeros_like(source)
        copied = 2 * source.nbytes / best_s(lambda: target.copy_(source), 0.04)
        op_s = _op_s()
    return CpuRates(
        title=title(),
        cores=n_cores,
        memory_bytes=host_memory_bytes(),
        fp32_flops_per_s=flops[torch.float32] * n_cores,
        bf16_flops_per_s=flops[torch.bfloat16] * n_cores,
        memory_bytes_per_s=copied * min(n_cores, _MEMORY_CORES),
        op_s=op_s,
        measured_s=time.perf_counter() - began,
    )


def _matmul_flops_per_s(dtype: torch.dtype, *, budget_s: float = 0.04) -> float:
    n = 384
    a = torch.ones(n, n, dtype=dtype)
    return float(2 * n**3 / best_s(lambda: a @ a, budget_s))


def _op_s() -> float:
    """Return the overhead of an op: seconds per op of a tiny training step in Python and autograd."""
    # The median, not the minimum: it includes the garbage collector and cold caches of a real program.
    layers, width = 6, 8
    parts = [
        part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
    ]
    model, batch = nn.Sequential(*parts), torch.ones(2, width)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        # The caller may be under no_grad, where autograd's overhead would be missing.
        with torch.enable_grad():
            model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    # A layer's ops, as a recording counts them: 3 forward, 6 backward, 9 for each of 4 parameters.
    return median_s(step, 0.12) / (layers * (3 + 6 + 9 * 4))


def median_s(
    run: Callable[[], object], budget_s: float, clock: Callable[[], float] = time.thread_time
) -> float:
    """Return the median of as many runs as fit into `budget_s`, at least three, after a warm-up run."""
    # The default `clock` is the CPU time of this thread, which excludes other processes and threads.
    run()
    times: list[float] = []
    stop = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < stop:
        start = clock()
        run()
        times.append(clock() - start)
    return statistics.median(times)
