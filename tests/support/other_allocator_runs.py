"""Runs on the simulated accelerator whose memory memtune's own allocator serves, each in a process of its own
(`python -m support.other_allocator_runs RUN ...`): torch changes the allocator only before its first use.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
from typing import Any

from support.simulated_device import races, start

# isort: split
import torch
from support.zoo_paths import ZOO

from memtune import _native
from memtune.memory import cuda_arena
from memtune.testing.training import differences, train, train_under

MIB = 1 << 20
CAPACITY_BYTES = 96 * MIB
DEVICE = 1
"""Not the current device, which is 0."""
SIZES = (
    lambda draw: draw(1, 2000),
    lambda draw: draw(100 << 10, 2 * MIB),
    lambda draw: draw(2 * MIB, 24 * MIB),
)


def started(pace: str = "deferred", seed: int = 0) -> torch.device:
    start(2, CAPACITY_BYTES, pace=pace, seed=seed)  # type: ignore[arg-type]
    assert cuda_arena.installed(), cuda_arena.why_not()
    return torch.device("sim", DEVICE)


def trains(kind: str) -> dict[str, Any]:
    """Return how training, with activations copied out, differs from the plain model's on CPU."""
    device = started()
    settings = {
        "allocator": {"kind": kind},
        "offload": {"activations": {"kind": "copy_out", "min_bytes": 0}},
        "execution": {"micro_batch": 2, "accumulate": 2},
    }
    got = train_under(ZOO["gpt"], {"settings": settings}, steps=6, device=device)
    return {"differences": differences(got, train(ZOO["gpt"], steps=6)), **bytes_of(device)}


def bytes_of(device: torch.device) -> dict[str, Any]:
    """Return the bytes that the driver and torch's requests show, and those that the allocator counts."""
    torch.accelerator.synchronize(device)
    shown, counted = torch.accelerator.memory_stats(device), _native.arena_statistics(DEVICE)
    return {
        "shown": [
            shown[f"{name}_bytes.all.{which}"]
            for name in ("allocated", "reserved")
            for which in ("current", "peak")
        ],
        "counted": [
            *(counted.allocated_bytes, counted.peak_allocated_bytes),
            *(counted.reserved_bytes, counted.peak_reserved_bytes),
        ],
        "races": races(),
        "stitched": counted.states[2],
        "plans": counted.plans,
    }


def served(pace: str, seed: str) -> dict[str, Any]:
    """Allocate, use on other streams and free at random, with little memory; blocks keep their values."""
    device, draws = started(pace, int(seed)), random.Random(seed)
    streams = [torch.sim.default_stream(device), *(torch.sim.Stream(device) for _ in range(2))]  # type: ignore[attr-defined]
    live: list[tuple[torch.Tensor, torch.Stream, int]] = []
    wrong = refused = 0
    for step in range(800):
        what, stream = draws.random(), draws.choice(streams)
        try:
            if what < 0.5:
                with torch.sim.stream(stream):  # type: ignore[attr-defined]
                    made = torch.empty(draws.choice(SIZES)(draws.randrange), dtype=torch.uint8, device=device)
                    live.append((made.fill_(step % 251), stream, step % 251))
            elif what < 0.7 and live:
                block, own, value = draws.choice(live)
                stream.wait_stream(own)  # type: ignore[attr-defined]
                block.record_stream(stream)
                with torch.sim.stream(stream):  # type: ignore[attr-defined]
                    wrong += int((block[-1000:] != value).sum())
            elif what < 0.97 and live:
                live.pop(draws.randrange(len(live)))
            elif what < 0.98:
                torch.accelerator.empty_cache()
            else:
                _native.arena_end_step(DEVICE)
        except RuntimeError as error:
            if "CUDA out of memory" not in str(error):
                raise
            refused += 1
            del live[:: draws.randrange(2, 4)]
    torch.accelerator.synchronize(device)
    wrong += sum(int((block != value).sum()) for block, _, value in live)
    return {"wrong": wrong, "refused": refused, **bytes_of(device)}


def misused() -> dict[str, Any]:
    """Return what is raised for memory that is unmapped, and for a block that is freed, while ops use it."""
    device, found = started(), []
    side = torch.sim.Stream(device)  # type: ignore[attr-defined]

    def raised(run: Any) -> None:
        try:
            run()
        except RuntimeError as error:
            found.append(str(error))
        races()

    for _ in range(2):  # the second call of an op is queued
        block = torch.empty(4 * MIB, dtype=torch.uint8, device=device).fill_(1)
    side.wait_stream(torch.accelerator.current_stream(device))
    with torch.sim.stream(side):  # type: ignore[attr-defined]
        block.add_(1)
    del block
    raised(lambda: torch.empty(4 * MIB, dtype=torch.uint8, device=device))
    torch.accelerator.synchronize(device)
    block = torch.empty(4 * MIB, dtype=torch.uint8, device=device).fill_(1)
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuCtxPushCurrent_v2(ctypes.c_void_p(DEVICE + 1))
    driver.cuMemUnmap(ctypes.c_ulonglong(block.data_ptr()), ctypes.c_size_t(4 * MIB))
    raised(lambda: torch.accelerator.synchronize(device))
    raised(lambda: block.fill_(2))
    return {"raised": found}


if __name__ == "__main__":
    print(json.dumps({"trains": trains, "served": served, "misused": misused}[sys.argv[1]](*sys.argv[2:])))  # type: ignore[operator]
    sys.stdout.flush()
    import os

    os._exit(0)  # blocks that the runs have broken are not freed
