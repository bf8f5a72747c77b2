"""Prediction of one candidate: times, bytes, their bounds, and what they consist of."""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from memtune.autotune.predict.breakdown import RESOURCES, OpTime
from memtune.program import Resource
from memtune.units import format_bytes, format_seconds

Level = Literal["coarse", "events"]

_HIDDEN = 0.25
"""Part of a hidden transfer that becomes exposed if all of its kind take longer."""


class Interval(NamedTuple):
    """Bounds of the true values; pruning relies on `peak_low_bytes`."""

    peak_low_bytes: int
    peak_high_bytes: int
    step_low_s: float
    step_high_s: float


@dataclass(frozen=True)
class Prediction:
    """Prediction of one candidate; bytes are per rank, of the rank class with the largest peak."""

    level: Level
    step_s: float
    """One optimizer step, all micro-batches, of the slowest rank class."""
    samples_per_s: float
    """Over all ranks, each training on its own micro-batch."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    host_peak_bytes: int
    ssd_peak_bytes: int
    busy_s: dict[str, float]
    """Seconds per optimizer step by resource, including `host_issue`; unused resources are omitted."""
    exposed_s: dict[str, float]
    """Part of `busy_s` not overlapped with compute; at the coarse level a lower bound."""
    peak_by_kind: dict[str, int]
    """Device bytes at the peak; they add up to `peak_allocated_bytes`."""
    peak_op: str
    """Name of the first op at the peak, empty for a step without ops."""
    peak_module: str
    interval: Interval
    calibrated: bool
    step_correction: float = 1.0
    """Correction factor from trials, included in `step_s`, not in seconds of ops or resources."""
    communicator_bytes: int = 0
    """Device bytes that communicators hold outside PyTorch's allocator; included in no peak."""
    outside_bytes: int = 0
    """Device bytes outside PyTorch's allocator that tools such as nvidia-smi count: context and
    communicators."""
    outside_range: tuple[int, int] = (0, 0)
    """Bounds of `outside_bytes`."""
    estimated_bytes: int = 0
    """Workspaces and reserves that are estimated, not measured; they may be none or twice as much."""
    allocated_factors: tuple[float, float] = (1.0, 1.0)
    """Bounds of true over predicted allocated bytes, and of reserved ones."""
    reserved_factors: tuple[float, float] = (1.0, 1.0)
    device_factors: tuple[float, float] = (1.0, 1.0)
    """Of the device's total where the sizes outside the allocator are known."""
    exposed_by_op: tuple[OpTime, ...] = ()
    """The ops that compute waits for longest, of the slowest rank class; empty at the coarse level."""
    critical_path: tuple[OpTime, ...] = ()
    """The longest parts of the chain of ops that determines `step_s`; empty at the coarse level."""
    critical_s: dict[str, float] = field(default_factory=dict)
    """Seconds of that chain by resource; without `step_correction` they add up to `step_s`."""
    mechanism_s: dict[str, float] = field(default_factory=dict)
    """`critical_s` with `compute` divided into own ops, recomputation and optimizer, or `exposed_s` so."""
    ssd_written_bytes: int = 0
    """Bytes per optimizer step, all micro-batches: SSDs wear."""
    batch_spread_bytes: tuple[int, int] = (0, 0)
    """Bytes of the peak below and above for smaller and larger batches, where batches vary in size; included
    in the intervals."""

    @functools.cached_property
    def mechanism_shares(self) -> dict[str, float]:
        """Return by mechanism the share of the step by which the step grows if it takes twice as long.

        Without the model's own compute. Seconds hidden behind compute count by a part.
        """
        whole = self.step_s / self.step_correction or 1.0
        shown, compute = self.mechanism_s, RESOURCES[Resource.COMPUTE]
        found = {name: seconds / whole for name, seconds in shown.items() if name != compute}
        for name, busy_s in self.busy_s.items():
            hidden_s = busy_s - shown.get(name, 0.0)
            if name != compute and hidden_s > 0:
                found[name] = found.get(name, 0.0) + _HIDDEN * hidden_s / whole
        return found

    def is_within(self, budget_bytes: int | None) -> bool:
        """Return whether the peak of allocated bytes is at most `budget_bytes`; None is no limit."""
        return budget_bytes is None or self.peak_allocated_bytes <= budget_bytes

    @property
    def allocated_bytes(self) -> tuple[int, int, int]:
        """Return the peak of allocated bytes and its bounds."""
        return _with_bounds(
            self.peak_allocated_bytes,
            self.allocated_factors,
            (self.estimated_bytes, self.estimated_bytes),
            self.batch_spread_bytes,
        )

    @property
    def reserved_bytes(self) -> tuple[int, int, int]:
        """Return the peak of reserved bytes and its bounds; it is never below allocated bytes."""
        peak, low, high = _with_bounds(
            self.peak_reserved_bytes,
            self.reserved_factors,
            (self.estimated_bytes, self.estimated_bytes),
            self.batch_spread_bytes,
        )
        return peak, max(low, self.allocated_bytes[1]), high

    @property
    def device_bytes(self) -> tuple[int, int, int]:
        """Return the peak of the device's memory in use, as nvidia-smi shows it, and its bounds."""
        outside, (least, most) = self.outside_bytes, self.outside_range
        whole, low, high = _with_bounds(
            self.peak_reserved_bytes + outside,
            self.device_factors,
            (self.estimated_bytes, self.estimated_bytes),
            (outside - least, most - outside),
            self.batch_spread_bytes,
        )
        return whole, max(low, self.reserved_bytes[1]), high

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data, and allocated, reserved and device's bytes with their bounds."""
        values = {**asdict(self), "interval": self.interval._asdict()}
        for name, (whole, low, high) in (
            ("allocated", self.allocated_bytes),
            ("reserved", self.reserved_bytes),
            ("device", self.device_bytes),
        ):
            values |= {f"{name}_bytes": whole, f"{name}_low_bytes": low, f"{name}_high_bytes": high}
        return values

    def __str__(self) -> str:
        """Return peak and step time with their interval, and "uncalibrated" if no trial is behind it."""
        low, high, fast, slow = self.interval
        return (
            f"peak {format_bytes(self.peak_allocated_bytes)} ({format_bytes(low)} to {format_bytes(high)}), "
            f"step {format_seconds(self.step_s)} ({format_seconds(fast)} to {format_seconds(slow)})"
            f"{'' if self.calibrated else ', uncalibrated'}"
        )


def _with_bounds(whole: int, factors: tuple[float, float], *errors: tuple[int, int]) -> tuple[int, int, int]:
    """Return `whole` and its bounds, from factors on it and `errors` (bytes below, bytes above)."""
    # They are independent of each other, so their squares add up.
    low, high = factors
    below, above = zip((whole * (1 - low), whole * (high - 1)), *errors, strict=True)
    return whole, math.floor(whole - math.hypot(*below)), math.ceil(whole + math.hypot(*above))
