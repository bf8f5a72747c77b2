"""A quick look at this machine's CPU: rates of matrix products and memory, and what one small op costs.

One core is measured and the rest taken to be like it: a second thread would measure whoever else is using the machine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

_MEMORY_CORES = 4  # cores beyond these seldom add memory bandwidth


@dataclass(frozen=True)
class CpuRates:
    """What was found; rates are for all cores together."""

    title: str
    cores: int
    memory_bytes: int
    fp32_flops_per_s: float
    bf16_flops_per_s: float
    memory_bytes_per_s: float
    op_s: float
    measured_s: float


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@functools.cache
def cpu() -> CpuRates:
    """Rates of this machine; measured in under half a second, once per process and machine (kept in the cache directory)."""
    file = _cache_file()
    with contextlib.suppress(OSError, ValueError, TypeError):
        kept = CpuRates(**json.loads(file.read_text()))
        if all(isinstance(getattr(kept, each.name), str if each.name == "title" else (int, float)) for each in fields(kept)):
            return kept
    rates = _measure()
    with contextlib.suppress(OSError):  # a cache that cannot be written only costs the next process half a second
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(rates)))
        partial.replace(file)
    return rates


def _cache_file() -> Path:
    shared = os.environ.get("XDG_CACHE_HOME")
    root = os.environ.get("MEMTUNE_CACHE") or str((Path(shared) if shared else Path.home() / ".cache") / "memtune")
    key = f"{_title()}|{cores()}|{torch.__version__}|1"
    return Path(root) / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def _title() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _best_s(run: Callable[[], object], budget_s: float) -> float:
    """Shortest of as many runs as `budget_s` holds, two at least: the machine may be busy, never faster than it is."""
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
    began, threads, n_cores = time.perf_counter(), torch.get_num_threads(), cores()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            flops = {dtype: _matmul_flops_per_s(dtype) for dtype in (torch.float32, torch.bfloat16)}
        source = torch.zeros(8 * 2**20)  # beyond most caches
        target = torch.zeros_like(source)
        copied = 2 * source.nbytes / _best_s(lambda: target.copy_(source), 0.04)
        op_s = _op_s()
    finally:
        torch.set_num_threads(threads)
    return CpuRates(
        title=_title(),
        cores=n_cores,
        memory_bytes=host_memory_bytes(),
        fp32_flops_per_s=flops[torch.float32] * n_cores,
        bf16_flops_per_s=flops[torch.bfloat16] * n_cores,
        memory_bytes_per_s=copied * min(n_cores, _MEMORY_CORES),
        op_s=op_s,
        measured_s=time.perf_counter() - began,
    )


def _matmul_flops_per_s(dtype: torch.dtype, n: int = 384) -> float:
    a = torch.ones(n, n, dtype=dtype)
    return float(2 * n**3 / _best_s(lambda: a @ a, 0.04))


def _op_s(length: int = 50) -> float:
    """Seconds per op of a chain of tiny ones, forward and backward: dispatch, autograd and Python."""
    leaf = torch.ones(16, requires_grad=True)

    def chain() -> None:
        with torch.enable_grad():
            value = leaf
            for _ in range(length):
                value = value * leaf + leaf
            torch.autograd.grad(value.sum(), leaf)

    # Forward two ops a link; backward two products and two sums of gradients.
    return _best_s(chain, 0.04) / (6 * length)
