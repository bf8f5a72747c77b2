"""Paired CPU times and counts of the ways in which one step can run, for `overhead.py`.

All ways run in one process, in rotation; a sample is the CPU time of a few steps of one way. Other work on
the machine changes wall time but not CPU time, except through shared caches, which pairs within a round
share. Counts are of one step of a warmed-up way, on this thread.
"""

from __future__ import annotations

import gc
import inspect
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

Way = Callable[[], object]
"""Runs one training step."""
Times = Mapping[str, NDArray[np.float64]]
"""(rounds,) seconds by way."""


@dataclass(frozen=True)
class Counts:
    """Work of one step on the thread that calls it."""

    aten_ops: int
    """Ops below autograd, views included."""
    python_calls: int
    """Python functions entered."""
    callbacks: int
    """Python functions entered from C++: hooks of autograd, backward of Python nodes, kernels in Python."""
    dispatches: int
    """Ops that a dispatch mode of the way itself sees."""
    mode_entries: int
    """Dispatch modes entered."""


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _dispatches(owner: object, frame: FrameType) -> bool:
    """Return whether `frame` is the function, of whatever name, by which the mode `owner` sees an op."""
    if not isinstance(owner, TorchDispatchMode):
        return False
    return inspect.unwrap(type(owner).__torch_dispatch__).__code__ is frame.f_code


def counts_of(way: Way) -> Counts:
    """Return the counts of one step; ops are counted in a step of their own, under a mode."""
    found: Counter[str] = Counter()
    inside_c: list[FrameType] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found["calls"] += 1
            if inside_c and inside_c[-1] is frame.f_back:
                found["callbacks"] += 1
            name, owner = frame.f_code.co_name, frame.f_locals.get("self")
            if name == "__torch_dispatch__" or _dispatches(owner, frame):
                found["dispatches"] += 1
            elif name == "__enter__" and isinstance(owner, TorchDispatchMode):
                found["modes"] += 1
        elif event == "c_call":
            inside_c.append(frame)
        elif event in ("c_return", "c_exception") and inside_c:
            inside_c.pop()

    sys.setprofile(note)
    try:
        way()
    finally:
        sys.setprofile(None)
    ops = _Ops()
    with ops:
        way()
    way()  # what decides under a mode may have seen another one
    return Counts(ops.count, found["calls"], found["callbacks"], found["dispatches"], found["modes"])


@dataclass(frozen=True)
class Paired:
    """CPU seconds of one way, and its ratio to a reference in the same round."""

    step_s: float
    """Median CPU seconds of a step."""
    ratio: float
    """Median over rounds of this way over the reference."""
    ratio_low: float
    ratio_high: float
    """Quartiles of the same."""


def measure(
    ways: Mapping[str, Way],
    rounds: int,
    *,
    steps: int = 3,
    warmup: int = 4,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, NDArray[np.float64]]:
    """Return (rounds,) CPU seconds of a step of each way; each round runs all ways in a new random order."""
    order, draw = list(ways), random.Random(0)
    for way in ways.values():
        for _ in range(warmup):
            way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        draw.shuffle(order)
        gc.collect()
        for name in order:
            way = ways[name]
            way()  # caches of this way's tensors
            began = clock()
            for _ in range(steps):
                way()
            found[name].append((clock() - began) / steps)
    return {name: np.asarray(times) for name, times in found.items()}


def paired(times: Times, name: str, reference: str) -> Paired:
    """Return `name` over `reference`, round by round."""
    ratios = times[name] / times[reference]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return Paired(float(np.median(times[name])), float(middle), float(low), float(high))
