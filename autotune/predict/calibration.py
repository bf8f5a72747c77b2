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
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from memtune.autotune.predict.simulation import Calibration
from memtune.hardware import (
    CLASSES,
    EVERY_CLASS,
    Curve,
    Device,
    Hardware,
    OpTime,
    calibration_cache,
    cpu_probe,
    op_s,
)

_BINS_A_DECADE = 2
_LARGEST_FACTOR = 20.0
"""Residuals beyond this factor, in either direction, are considered outliers and clipped."""
_MOST_SEARCHES = 20
"""Number of latest searches to keep."""


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
"""Logarithm of the time at peak rates, measured and predicted seconds, all weighted by the number of ops;
that number.
"""
_FILE: TypeAdapter[list[SearchErrors]] = TypeAdapter(list[SearchErrors])


def oom_probability(calibration: Calibration, peak_bytes: int, budget_bytes: int | None) -> float | None:
    """Return the probability that a predicted peak of `peak_bytes` exceeds `budget_bytes`.

    Of n earlier ratios, k exceed what the budget allows: the probability is between k / (n + 1) and (k + 1) /
    (n + 1), and its middle is returned. So it is never 0 or 1, and approaches them as trials agree.

    Returns:
        0 without a budget; None with fewer trials than an interval needs.
    """
    if budget_bytes is None:
        return 0.0
    ratios = calibration.peak_ratios
    if len(ratios) < Calibration.ENOUGH or peak_bytes <= 0:
        return None
    above = sum(ratio > budget_bytes / peak_bytes for ratio in ratios)
    return (above + 0.5) / (len(ratios) + 1)


def residuals(rows: Iterable[OpTime], hardware: Hardware) -> dict[str, Curve]:
    """Return by op class a curve over size of measured time over `hardware`'s prediction.

    Sizes are half decades of the time at peak rates; in each, measured and predicted seconds are summed, so
    that ops count by their time. `EVERY_CLASS` is the factor of all rows, for classes without rows.
    """
    plain = replace(hardware, residuals={})
    sums: dict[str, dict[int, list[_Entry]]] = {}
    for row in rows:
        if row.op_class not in CLASSES:
            continue  # of another version
        at_peak_s, expected_s = op_s(
            row.op_class, row.dtype, row.flops, row.traffic_bytes, plain, ranks=row.ranks
        )
        if at_peak_s > 0 and expected_s > 0:
            size = math.floor(math.log10(at_peak_s) * _BINS_A_DECADE)
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
