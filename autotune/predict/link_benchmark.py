"""Measure the link between ranks of this machine.

Two processes all-reduce messages of two sizes, with the backend of their device.

Run as `python -m memtune.autotune.predict.link_benchmark RANK RANKS DEVICE FILE BYTES`; rank 0 prints
seconds per size as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from memtune.device import accelerator, backend_of, streams

_TIMEOUT_S = 30


def measure(device_type: str = "cpu", *, ranks: int = 2, large_bytes: int = 2**24) -> tuple[float, float]:
    """Return bytes per second and seconds per ring step of an all-reduce among `ranks` fresh processes,
    each with a device of type `device_type`.

    Raises:
        RuntimeError: The processes failed or took longer than half a minute; the message is the last line of
            one.
    """
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "memtune.autotune.predict.link_benchmark"]
        arguments = [str(ranks), device_type, str(Path(place) / "store"), str(large_bytes)]
        children = [
            subprocess.Popen(
                [*command, str(rank), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(ranks)
        ]
        try:
            results = [child.communicate(timeout=_TIMEOUT_S) for child in children]
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"no answer within {_TIMEOUT_S} s") from error
        finally:
            for child in children:
                child.kill()
    for child, (_, errors) in zip(children, results, strict=True):
        if child.returncode != 0:
            raise RuntimeError((errors.strip().splitlines() or ["no output"])[-1])
    seconds = json.loads(results[0][0])
    small_bytes, rounds = 1024, 2 * (ranks - 1)
    step_s = seconds[str(small_bytes)] / rounds
    on_link = large_bytes * rounds / ranks  # of the message, per rank and direction
    return on_link / max(seconds[str(large_bytes)] - seconds[str(small_bytes)], 1e-9), step_s


def main(rank: int, ranks: int, device_type: str, file: str, large_bytes: int) -> None:
    """Run one rank: three all-reduces per size, of which the fastest counts."""
    torch.set_num_threads(1)
    device = torch.device(device_type) if device_type == "cpu" else torch.device(device_type, rank)
    accelerator.select(device)  # the barrier below uses the current one
    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group(
        backend_of(device_type), init_method=f"file://{file}", rank=rank, world_size=ranks, timeout=timeout
    )
    found: dict[int, float] = {}
    for n_bytes in (1024, large_bytes):
        message = torch.ones(n_bytes // 4, device=device)
        times = []
        for _ in range(4):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(message)
            streams.synchronize(device)
            times.append(time.perf_counter() - start)
        found[n_bytes] = min(times[1:])
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
