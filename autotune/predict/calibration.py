"""Calibrate predictions by trials: op times by class and size, whole steps, peaks.

A trial reports how long its ops took (`memtune.hardware.op_timings`). Where ops of a class and size took
longer or shorter than predicted, later predictions of this search are corrected, and those of later runs on
this machine: every search stores its results in the cache directory. MEMTUNE_LEARN=0 disables reading and
writing it.

Conformal prediction (Vovk, Gammerman, Shafer 2005, section 2.2): the next measured-over-predicted ratio is
equally likely to fall into each of the gaps between earlier ratios, whatever their distribution. A trial that
contributed op times is predicted without them (jackknife+, Barber et al. 2021, section 1), otherwise its own
ratio would be too good.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from memtune.hardware import (
    CLASSES,
    EVERY_CLASS,
    Curve,
    Device,
    Hardware,
    OpTime,
    calibration_cache,
    cpu_probe,
    half_decade,
    op_s,
)

if TYPE_CHECKING:
    from memtune.autotune.predict.prediction import Prediction

# Ranges of true over predicted values without any trial behind them. Bytes: derived from published
# measurements, and tried on sources that they were not derived from, by `benchmarks/published_ranges.py`.
# Rows give 0.95 to 1.06 for torch's counters since a case of the widest one follows its source; the range
# from before is kept, because rows that were read fit better than those to come. Times: a roofline is seldom
# off by more than these factors.
UNCALIBRATED_PEAK = (0.92, 1.09)
UNCALIBRATED_RESERVED = UNCALIBRATED_PEAK
UNCALIBRATED_DEVICE = (0.88, 1.13)
UNCALIBRATED_STEP = (0.4, 2.5)

_LARGEST_FACTOR = 20.0
"""Residuals beyond this factor, in either direction, are considered outliers and clipped."""
_MOST_SEARCHES = 20
"""Number of latest searches to keep."""


@dataclass(frozen=True)
class Calibration:
    """Errors of earlier predictions: one ratio of measured to predicted per trial."""

    peak_ratios: tuple[float, ...] = ()
    step_ratios: tuple[float, ...] = ()

    ENOUGH = 3
    """Fewest trials for an interval based on trials."""
    LEVEL = 0.9
    """Share of trials that the interval should contain."""

    def add(
        self, prediction: Prediction, measured_peak_bytes: int | None, measured_step_s: float | None
    ) -> Calibration:
        """Return this calibration with one more trial.

        A value not measured (an out-of-memory trial has no time) is None.
        """
        peaks, steps = self.peak_ratios, self.step_ratios
        if measured_peak_bytes and prediction.peak_allocated_bytes:
            peaks += (measured_peak_bytes / prediction.peak_allocated_bytes,)
        if measured_step_s and prediction.step_s:
            # Of the uncorrected prediction: a correction of a correction would not converge.
            steps += (measured_step_s * prediction.step_correction / prediction.step_s,)
        return Calibration(peaks, steps)

    @property
    def step_correction(self) -> float:
        """Return the median of measured over predicted step time, 1 without trials."""
        return statistics.median(self.step_ratios) if self.step_ratios else 1.0

    def peak_range(self) -> tuple[float, float]:
        """Return the range of factors on the predicted peak; it always includes 1."""
        low, high = _conformal(self.peak_ratios, floor=0.005) or UNCALIBRATED_PEAK
        # Peaks are counted, not estimated, so trials may widen the range but never exclude the count itself.
        return min(low, 1.0), max(high, 1.0)

    def reserved_range(self) -> tuple[float, float]:
        """Return the range of factors on predicted reserved bytes; trials measure allocated ones."""
        if len(self.peak_ratios) >= self.ENOUGH:
            return self.peak_range()
        return UNCALIBRATED_RESERVED

    def device_range(self) -> tuple[float, float]:
        """Return the range of factors on the device's total; trials measure allocated bytes."""
        if len(self.peak_ratios) >= self.ENOUGH:
            return self.peak_range()
        return UNCALIBRATED_DEVICE

    def step_range(self) -> tuple[float, float]:
        """Return the range of factors on the corrected step time."""
        found = _conformal([ratio / self.step_correction for ratio in self.step_ratios], floor=0.02)
        return found or UNCALIBRATED_STEP

    @property
    def is_calibrated(self) -> bool:
        """Return whether there are enough trials for both intervals."""
        return min(len(self.peak_ratios), len(self.step_ratios)) >= self.ENOUGH


def _conformal(ratios: Iterable[float], *, floor: float) -> tuple[float, float] | None:
    """Return median ± the split-conformal quantile of the logarithmic residuals; None with too few."""
    # With too few residuals for the level, the largest one, doubled, replaces the missing quantile.
    # Ratios are symmetric in the logarithm: twice and half are errors of one size.
    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < Calibration.ENOUGH:
        return None
    centre = statistics.median(logs)
    scores = sorted(abs(each - centre) for each in logs)
    # Split conformal prediction (Vovk et al. 2005): the ceil((n + 1) q)-th smallest score.
    rank = math.ceil((len(scores) + 1) * Calibration.LEVEL)
    width = max(scores[rank - 1] if rank <= len(scores) else 2 * scores[-1], floor)
    return math.exp(centre - width), math.exp(centre + width)


class SearchErrors(BaseModel):
    """Results of one search on this machine for calibration."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    date: str
    """ISO 8601."""
    workload: str
    op_times: list[OpTime] = []
    peak_ratios: list[float] = []
    """Measured over predicted, one per trial."""
    step_ratios: list[float] = []


_Entry = tuple[float, float, float, float]
"""Log of time at peak rates, measured and predicted seconds, weighted by the number of ops; that number."""
_FILE: TypeAdapter[list[SearchErrors]] = TypeAdapter(list[SearchErrors])


def oom_probability(calibration: Calibration, peak_bytes: int, budget_bytes: int | None) -> float | None:
    """Return the probability that a predicted peak of `peak_bytes` exceeds `budget_bytes`.

    Returns:
        0 without a budget; None with fewer trials than an interval needs.
    """
    # Of n earlier ratios, k exceed what the budget allows: the probability is between k / (n + 1) and (k + 1)
    # / (n + 1), and its middle is returned. So it is never 0 or 1, and approaches them as trials agree.
    if budget_bytes is None:
        return 0.0
    ratios = calibration.peak_ratios
    if len(ratios) < Calibration.ENOUGH or peak_bytes <= 0:
        return None
    above = sum(ratio > budget_bytes / peak_bytes for ratio in ratios)
    return (above + 0.5) / (len(ratios) + 1)


def residuals(rows: Iterable[OpTime], hardware: Hardware) -> dict[str, Curve]:
    """Return by op class a curve over size of measured time over `hardware`'s prediction."""
    # Sizes are half decades of the time at peak rates; in each, measured and predicted seconds are summed, so
    # that ops count by their time. `EVERY_CLASS` is the factor of all rows, for classes without rows.
    plain = replace(hardware, residuals={})
    sums: dict[str, dict[int, list[_Entry]]] = {}
    for row in rows:
        if row.op_class not in CLASSES:
            continue  # of another version
        at_peak_s, expected_s = op_s(
            row.op_class, row.dtype, row.flops, row.traffic_bytes, plain, ranks=row.ranks
        )
        if at_peak_s > 0 and expected_s > 0:
            size = half_decade(at_peak_s)
            entry = (
                math.log(at_peak_s) * row.count,
                row.seconds * row.count,
                expected_s * row.count,
                row.count,
            )
            sums.setdefault(row.op_class, {}).setdefault(size, []).append(entry)
    if not sums:
        return {}
    found = {kind: tuple(_point(bins[size]) for size in sorted(bins)) for kind, bins in sums.items()}
    whole = [entry for bins in sums.values() for entries in bins.values() for entry in entries]
    return {**found, EVERY_CLASS: (_point(whole),)}


def _point(entries: list[_Entry]) -> tuple[float, float]:
    logs, seen, expected, count = (sum(column) for column in zip(*entries, strict=True))
    return math.exp(logs / count), min(max(seen / expected, 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)


# -- what earlier searches on this machine taught ------------------------------------------------------------


def load_searches(device: Device) -> list[SearchErrors]:
    """Return the results of earlier searches on this machine, latest last; none if unreadable."""
    if not _is_enabled():
        return []
    try:
        document = json.loads(_path(device).read_text())
        return (
            _FILE.validate_python(document["searches"])
            if document["machine"] == calibration_cache.machine(device)
            else []
        )
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return []


def store_search(device: Device, taught: SearchErrors) -> None:
    """Store `taught` for later runs on this machine; a cache that cannot be written is ignored."""
    if not _is_enabled() or not (taught.op_times or taught.peak_ratios):
        return
    searches = [*load_searches(device), taught][-_MOST_SEARCHES:]
    document = {
        "machine": calibration_cache.machine(device),
        "searches": [each.model_dump() for each in searches],
    }
    path = _path(device)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(document))
        # Atomic: another search on this machine may read it meanwhile.
        partial.replace(path)


def calibration_of(searches: Iterable[SearchErrors]) -> Calibration:
    """Return all trials of `searches` as one calibration."""
    searches = list(searches)
    peaks = tuple(ratio for each in searches for ratio in each.peak_ratios if ratio > 0)
    return Calibration(peaks, tuple(ratio for each in searches for ratio in each.step_ratios if ratio > 0))


def _is_enabled() -> bool:
    return os.environ.get("MEMTUNE_LEARN", "1") != "0"


def _path(device: Device) -> Path:
    return (
        cpu_probe.cache_dir()
        / f"trials-{device}-{hashlib.sha256(calibration_cache.machine(device).encode()).hexdigest()[:12]}.json"  # noqa: E501
    )
