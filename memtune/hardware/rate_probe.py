"""Rates of host copies, host updates and links, measured by the ranks of a trial where they train.

A trial's ranks measure at the same time, as they work at the same time: what they share (memory, cores, a
PCIe root) is shared here too. Takes half a second on CPU, less on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from memtune.device import Capability, platform_of, streams

_COPY_BYTES, _COPY_BYTES_ON_CPU = 2**26, 2**25
_EVICTED_BYTES = 2**27
"""Bytes that a rank writes before each timed run on the host. Offloaded tensors were not used for a while,
and servers have last-level caches of hundreds of MiB: copies and updates there are up to four times faster.
"""
_ADAM_PARAMETERS = 2**22
_MESSAGE_BYTES, _MESSAGE_BYTES_ON_CPU = (2**12, 2**20, 2**26), (2**14, 2**20, 2**24)
_COMPUTE_SIZE = 512
"""Rows of the matrix that ranks multiply between collectives: a few milliseconds of one core."""
_RUNS, _RUNS_ON_CPU = 10, 5
_MESSAGES_ON_CPU = 24
"""Runs of a small message, whose times differ by a factor of ten: either all of gloo's threads find a core,
or one of them waits until a computing thread's time slice ends."""


def measure_rates(device: torch.device, *, local_ranks: int) -> dict[str, float]:
    """Return constants of `Hardware` by field name, as measured by this rank together with the others.

    Args:
        device: Device of this rank.
        local_ranks: Ranks on this machine, which must all call this function.
    """
    # Links are measured if all ranks are on this machine; of others it is unknown which link a message takes.
    shared = local_ranks if device.type == "cpu" else 1
    # One for all: to map and clear its pages takes as long as several of the writes.
    other = torch.zeros(_EVICTED_BYTES // 4)
    found = _copy_rates(device, shared, other)
    found["host_adam_bytes_per_s"] = _adam_rate(device, other) * local_ranks
    del other
    if local_ranks > 1 and dist.is_initialized() and dist.get_world_size() == local_ranks:
        found |= _link_rates(device, local_ranks)
    return found


def _best_s(run: Callable[[], object], device: torch.device, runs: int, other: torch.Tensor) -> float:
    """Return the shortest time of `runs` runs from memory, which all ranks begin together.

    Args:
        run: Called without arguments; its time is measured.
        device: Device whose streams are waited for.
        runs: Number of runs.
        other: Written before each run, so that caches hold it.
    """
    best = float("inf")
    for _ in range(runs + 1):
        other.add_(1.0)
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        run()
        streams.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def _runs(device: torch.device) -> int:
    return _RUNS_ON_CPU if device.type == "cpu" else _RUNS


def _copy_rates(device: torch.device, shared: int, other: torch.Tensor) -> dict[str, float]:
    on_cpu = device.type == "cpu"
    n_bytes = _COPY_BYTES_ON_CPU if on_cpu else _COPY_BYTES
    host = torch.ones(n_bytes // 4)
    if Capability.PINNED in platform_of(device).capabilities:
        host = host.pin_memory()
    there = torch.ones_like(host, device=device)
    runs = _runs(device)
    up_s = _best_s(lambda: there.copy_(host, non_blocking=True), device, runs, other)
    down_s = _best_s(lambda: host.copy_(there, non_blocking=True), device, runs, other)
    return {
        "host_to_device_bytes_per_s": n_bytes / up_s * shared,
        "device_to_host_bytes_per_s": n_bytes / down_s * shared,
    }


def _adam_rate(device: torch.device, other: torch.Tensor) -> float:
    """Return bytes that torch's fused AdamW on the host reads and writes per second on this rank."""
    parameter = torch.zeros(_ADAM_PARAMETERS, requires_grad=True)
    parameter.grad = torch.ones(_ADAM_PARAMETERS)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    optimizer.step()  # makes its state
    return 7 * 4 * _ADAM_PARAMETERS / _best_s(optimizer.step, device, 3, other)


def _link_rates(device: torch.device, ranks: int) -> dict[str, float]:
    """Return latency of a ring's step, bytes per second on a link, and passes of the other collectives."""
    # Latency and rate are fitted to all-reduces of three sizes with the least relative error: seconds = 2 (n
    # - 1) (latency + bytes / n / rate). Passes follow from the ratio to an all-reduce of the same bytes. The
    # collectives are the seam's, as in training: on CPU they differ from gloo's own.
    sizes = _MESSAGE_BYTES_ON_CPU if device.type == "cpu" else _MESSAGE_BYTES
    chunks = {n_bytes: torch.ones(n_bytes // 4 // ranks, device=device) for n_bytes in sizes}
    whole = {n_bytes: torch.ones(len(chunk) * ranks, device=device) for n_bytes, chunk in chunks.items()}
    small_runs = _MESSAGES_ON_CPU if device.type == "cpu" else 2 * _RUNS
    runs = {n_bytes: _runs(device) if n_bytes == sizes[-1] else small_runs for n_bytes in sizes}
    group = dist.distributed_c10d._get_default_group().group_name
    seconds = {
        n_bytes: _usual_s(partial(dist.all_reduce, each), device, runs[n_bytes])
        for n_bytes, each in whole.items()
    }

    def passes(collective: Callable[[int], object]) -> float:
        ratios = (
            _usual_s(partial(collective, n_bytes), device, runs[n_bytes]) / seconds[n_bytes]
            for n_bytes in sizes[1:]
        )
        return 2 * statistics.geometric_mean(ratios)

    def all_gather(n_bytes: int) -> None:
        torch.ops.memtune.all_gather_into_(whole[n_bytes], chunks[n_bytes], group, ranks)

    def reduce_scatter(n_bytes: int) -> None:
        torch.ops.memtune.reduce_scatter_into_(chunks[n_bytes], whole[n_bytes], group, ranks, "sum")

    rounds = 2 * (ranks - 1)
    rows = torch.tensor(
        [[rounds / each_s, rounds * n_bytes / ranks / each_s] for n_bytes, each_s in seconds.items()],
        dtype=torch.float64,
    )
    latency_s, s_per_byte = torch.linalg.lstsq(rows, torch.ones(len(rows), 1, dtype=torch.float64)).solution[
        :, 0
    ]
    small, large = min(seconds), max(seconds)
    if latency_s <= 0 or s_per_byte <= 0:  # sizes whose times fall on no line: the two ends tell
        latency_s = seconds[small] / rounds
        s_per_byte = max(seconds[large] - seconds[small], 1e-9) / (rounds * large / ranks)
    return {
        "intra_link_latency_s": float(latency_s),
        "intra_link_bytes_per_s": 1 / float(s_per_byte),
        "all_gather_rounds": passes(all_gather),
        "reduce_scatter_rounds": passes(reduce_scatter),
    }


def _usual_s(collective: Callable[[], object], device: torch.device, runs: int) -> float:
    """Return the time that the ranks spend in a collective on average, each between products of matrices."""
    # Ranks that compute do not arrive together, and on CPU the backend's threads wait for a core. Both cost a
    # training step time, and neither shows if the ranks are idle before the collective. The slowest tenth is
    # left out: other load only makes it longer.
    matrix = torch.ones(_COMPUTE_SIZE, _COMPUTE_SIZE, device=device)
    times = []
    for _ in range(runs + 1):
        torch.mm(matrix, matrix)
        streams.synchronize(device)
        start = time.perf_counter()
        collective()
        streams.synchronize(device)
        times.append(time.perf_counter() - start)
    kept = sorted(times[1:])[: -(-9 * runs // 10)]
    mine = torch.tensor(sum(kept) / len(kept), device=device)
    dist.all_reduce(mine)
    return float(mine) / dist.get_world_size()
