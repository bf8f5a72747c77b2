"""Events per second of the caching allocator's model on one core.

    python benchmarks/allocator_speed.py [--json]

`training` is a transformer's step from `event_stream`: few sizes, many live blocks. `random` draws each size
at random, which keeps hundreds of different free blocks.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from simulate_speed import synthetic_step

from memtune.autotune.predict.caching_allocator import (
    AllocatorEvents,
    AllocatorSettings,
    event_stream,
    replay,
)
from memtune.program.step import Step

SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:128",
    "roundup_power2_divisions:8",
    "backend:cudaMallocAsync",
)
STEPS = 100
WEIGHTS = tuple(n * 2**20 for n in (1, 16, 64, 64, 128))
OUTPUTS = tuple(n * 2**10 for n in (4, 32, 512, 8192, 8192, 8192, 24576, 32768))


def training_step() -> Step:
    """Return a synthetic step with a transformer's few tensor sizes instead of random ones."""
    step, rng = synthetic_step(), np.random.default_rng(0)
    there, m = step.storages.producer < 0, step.storages.n
    return step.with_storages(bytes=np.where(there, rng.choice(WEIGHTS, m), rng.choice(OUTPUTS, m)))


def events_per_s(events: AllocatorEvents, settings: AllocatorSettings, seconds: float) -> float:
    """Return events per second of this thread's CPU time, measured over about `seconds`."""
    replay(events, settings, None)
    runs, start, wall = 0, time.thread_time(), time.monotonic()
    while time.monotonic() - wall < seconds:
        replay(events, settings, None)
        runs += 1
    return runs * len(events) / (time.thread_time() - start)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to measure each row")
    asked = parser.parse_args()
    programs = {
        "training": event_stream(training_step(), STEPS),
        "random": event_stream(synthetic_step(), STEPS),
    }
    rows: list[dict[str, Any]] = [
        {
            "program": name,
            "settings": text,
            "events": len(events),
            "events_per_s": round(events_per_s(events, AllocatorSettings.parse(text), asked.seconds)),
        }
        for name, events in programs.items()
        for text in SETTINGS
    ]
    if asked.json:
        print(json.dumps({"schema": 1, "rows": rows}))
        return
    for row in rows:
        print(
            f"{row['program']:<9} {row['settings'] or 'defaults':<28} {row['events_per_s'] / 1e6:6.1f}"
            " million events/s"
        )


if __name__ == "__main__":
    main()
