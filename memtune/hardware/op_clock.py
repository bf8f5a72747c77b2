"""A clock around every op: its name, cost and time; and one around the optimizer."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from memtune.device import streams
from memtune.hardware import flops
from memtune.program import Compression

_COMPUTE = frozenset((Compression().pack, Compression().unpack))
"""Operators of the seam that compute."""
_LONG = 20
"""Multiple of the median gap between ops; a longer gap is time spent waiting, not Python."""


@dataclass(frozen=True)
class TimedOp:
    """One timed op."""

    name: str
    dtype: str
    flops: float
    traffic_bytes: int
    seconds: float
    is_update: bool = False
    """True if an optimizer's step ran it."""


class UpdateClock:
    """Context that times the steps of all optimizers; `seconds` is their sum so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since: float | None = None
        self._step: tuple[int, CodeType] | None = None  # the frame that runs the step and its hooks
        self._hooks: list[Any] = []

    @property
    def is_running(self) -> bool:
        """Return whether an optimizer's step runs now, in this thread."""
        # Torch calls no hook at the end of a step that raises, but its frame is left.
        frame = None if self._since is None else sys._getframe(1)
        while frame is not None and (id(frame), frame.f_code) != self._step:
            frame = frame.f_back
        return frame is not None

    def __enter__(self) -> Self:
        self._hooks = [
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._hooks:
            each.remove()
        self._since = None

    def _begin(self, *_: Any) -> None:
        frame = sys._getframe(1)
        self._since, self._step = time.perf_counter(), (id(frame), frame.f_code)

    def _end(self, *_: Any) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
        self._since = None


class OpClock(TorchDispatchMode):
    """Dispatch mode that times every op except views and reads of values; on CUDA it synchronizes per op.

    Args:
        device: Device of the ops.
        clock: Function that returns seconds; by default `clock_of(device)`.

    Attributes:
        observed: Ops that computed.
        others_s: Seconds in ops that do not compute: copies between tiers, and the start of collectives.
        gaps_s: Seconds between consecutive ops of any kind.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.observed: list[TimedOp] = []
        self.others_s, self.gaps_s = 0.0, list[float]()
        self._end_s: float | None = None
        self._device, self._clock = device, clock or clock_of(device)
        self._update = UpdateClock()

    def __enter__(self) -> Self:
        self._update.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._update.__exit__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op with the device idle before and after it; for a DTensor, time the local op."""
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        start = self._clock()
        if self._end_s is not None:
            self.gaps_s.append(start - self._end_s)
        out = func(*args, **kwargs)
        # The kernel must have ended before the clock is read, and the next must find the device idle.
        streams.synchronize(self._device)
        seconds = self._clock() - start
        if func.namespace != "aten" and str(func) not in _COMPUTE:
            self.others_s += seconds
        elif not func.is_view:
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            outputs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
            if outputs or func._schema.is_mutable:
                traffic = sum(each.nbytes for each in tensors + outputs)
                dtype = (
                    str((tensors or outputs)[0].dtype).removeprefix("torch.")
                    if tensors or outputs
                    else "float32"
                )
                work = flops.count(func, args, kwargs, out)
                self.observed.append(
                    TimedOp(str(func), dtype, work, traffic, seconds, self._update.is_running)
                )
        # Again, so that the count of FLOPs above is no gap.
        self._end_s = self._clock()
        return out

    def waiting(self) -> float:
        """Return the fraction of the time in which this process did not compute."""
        # That is ops that do not compute, and gaps far longer than the median: a rank waits for
        # other ranks in `Work.wait`, which is not an op.
        usual_s = statistics.median(self.gaps_s) if self.gaps_s else 0.0
        waited_s = self.others_s + sum(gap_s - usual_s for gap_s in self.gaps_s if gap_s > _LONG * usual_s)
        whole_s = sum(each.seconds for each in self.observed) + self.others_s + sum(self.gaps_s)
        return waited_s / whole_s if whole_s > 0 else 0.0


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock for `device`: CPU time of the process on CPU, wall time on accelerators."""
    # Linux counts the CPU time of a process in ticks of milliseconds while a limit on it is set
    # (`ulimit -t`).
    is_coarse = resource.getrlimit(resource.RLIMIT_CPU)[0] != resource.RLIM_INFINITY
    return time.perf_counter if is_coarse or device.type != "cpu" else time.process_time
