"""How far a prediction can be trusted, and what trials teach the next one: ops by class and size, whole steps, peaks.

A trial tells how long its ops took (`memtune.runtime.op_times`). Where those of a class and size took longer or shorter than
predicted, all later predictions of this search are corrected, and those of later runs on this machine: every search leaves what
it learnt in the cache directory. MEMTUNE_LEARN=0 neither reads nor leaves anything there.

Conformal prediction (Vovk, Gammerman, Shafer 2005, section 2.2): a new trial's measured-over-predicted ratio is as likely to
fall into any of the gaps that the ratios so far leave. Nothing is assumed of how they are distributed. A trial that taught
something is predicted without what it taught (jackknife+, Barber et al. 2021, section 1), else its own ratio would be too good.
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

from memtune import measure, measured
from memtune.autotune.simulate import Calibration
from memtune.hardware import Device, Hardware
from memtune.measured import Curve
from memtune.op_costs import CLASSES, EVERY_CLASS, op_s
from memtune.runtime.op_times import OpTime

_BINS_A_DECADE = 2
_FARTHEST = 20.0
"""Residuals beyond this factor, either way, are taken for accidents and cut."""
_KEPT = 20
"""Searches that are remembered, the latest."""


class Taught(BaseModel):
    """What one search on this machine showed of the predictions."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    date: str
    """ISO 8601."""
    workload: str
    op_times: list[OpTime] = []
    peak_ratios: list[float] = []
    """Measured over predicted, one a trial."""
    step_ratios: list[float] = []


_Entry = tuple[float, float, float, float]
"""Logarithm of the time at peak rates, measured and predicted seconds, all times the number of ops; that number."""
_FILE: TypeAdapter[list[Taught]] = TypeAdapter(list[Taught])


def oom_probability(calibration: Calibration, peak_bytes: int, budget_bytes: int | None) -> float | None:
    """Chance that a candidate with the predicted peak `peak_bytes` needs more than `budget_bytes`.

    Of n ratios so far, k lie above what the budget allows: the chance is from k / (n + 1) to (k + 1) / (n + 1), its middle
    is given. So it is never 0 or 1, and nears them as trials agree.

    Returns:
        0 without a budget; None with fewer trials than an interval takes, where nothing can be said.
    """
    if budget_bytes is None:
        return 0.0
    ratios = calibration.peak_ratios
    if len(ratios) < Calibration.ENOUGH or peak_bytes <= 0:
        return None
    above = sum(ratio > budget_bytes / peak_bytes for ratio in ratios)
    return (above + 0.5) / (len(ratios) + 1)


def residuals(rows: Iterable[OpTime], hardware: Hardware) -> dict[str, Curve]:
    """By op class: at which size ops take how many times as long as `hardware` without residuals predicts.

    Sizes are half decades of the time at peak rates; in each, measured and predicted seconds are summed up, so that ops count by
    the time they take. `EVERY_CLASS` is the factor of all rows together, for classes that none of them is of.
    """
    plain = replace(hardware, residuals={})
    sums: dict[str, dict[int, list[_Entry]]] = {}
    for row in rows:
        if row.op_class not in CLASSES:
            continue  # of another version
        at_peak_s, expected_s = op_s(row.op_class, row.dtype, row.flops, row.traffic_bytes, plain, ranks=row.ranks)
        if at_peak_s > 0 and expected_s > 0:
            size = math.floor(math.log10(at_peak_s) * _BINS_A_DECADE)
            entry = math.log(at_peak_s) * row.count, row.seconds * row.count, expected_s * row.count, row.count
            sums.setdefault(row.op_class, {}).setdefault(size, []).append(entry)
    if not sums:
        return {}
    found = {kind: tuple(_point(bins[size]) for size in sorted(bins)) for kind, bins in sums.items()}
    whole = [entry for bins in sums.values() for entries in bins.values() for entry in entries]
    return {**found, EVERY_CLASS: (_point(whole),)}


def _point(entries: list[_Entry]) -> tuple[float, float]:
    logs, seen, expected, count = (sum(column) for column in zip(*entries, strict=True))
    return math.exp(logs / count), min(max(seen / expected, 1 / _FARTHEST), _FARTHEST)


# -- what earlier searches on this machine taught ----------------------------------------------------------------------------


def earlier(device: Device) -> list[Taught]:
    """What earlier searches on this machine taught, the latest last; nothing where that cannot be read."""
    if not _learns():
        return []
    try:
        document = json.loads(_path(device).read_text())
        return _FILE.validate_python(document["searches"]) if document["machine"] == measured.machine(device) else []
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        return []


def keep(device: Device, taught: Taught) -> None:
    """Remember `taught` for later runs on this machine; a cache that cannot be written costs only that."""
    if not _learns() or not (taught.op_times or taught.peak_ratios):
        return
    searches = [*earlier(device), taught][-_KEPT:]
    document = {"machine": measured.machine(device), "searches": [each.model_dump() for each in searches]}
    path = _path(device)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(document))
        partial.replace(path)


def calibration_of(searches: Iterable[Taught]) -> Calibration:
    """All trials of `searches` as one calibration."""
    searches = list(searches)
    peaks = tuple(ratio for each in searches for ratio in each.peak_ratios if ratio > 0)
    return Calibration(peaks, tuple(ratio for each in searches for ratio in each.step_ratios if ratio > 0))


def _learns() -> bool:
    return os.environ.get("MEMTUNE_LEARN", "1") != "0"


def _path(device: Device) -> Path:
    return measure.cache_dir() / f"trials-{device}-{hashlib.sha256(measured.machine(device).encode()).hexdigest()[:12]}.json"
