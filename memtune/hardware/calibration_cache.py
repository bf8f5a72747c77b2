"""Measurements of `memtune doctor --calibrate` on this machine, stored in the cache directory; they override
the table of known devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from memtune.device import accelerator
from memtune.hardware import cpu_probe
from memtune.hardware.cpu_cores import usable_cores

SCHEMA = 1

Curve = tuple[tuple[float, float], ...]
"""Points (seconds at the machine's peak rates, seconds that ops of a class took), both rising."""


@dataclass(frozen=True)
class Calibration:
    """Constants of one device of this machine, and how long its ops take."""

    machine: str
    """Machine to which the figures belong; other machines do not use them."""
    date: str
    """Day of the measurement, ISO 8601."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Values by field of `Hardware`, in its units."""
    how: Mapping[str, str] = field(default_factory=dict)
    """Description of the measurement of each constant."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Curves by op class."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further figures for reports: rates by size, pageable copies, and reasons for missing measurements."""
    schema: int = SCHEMA

    @property
    def source(self) -> str:
        """Source of these numbers, as named in predictions."""
        return f"measured on this machine {self.date}"


def machine(device: str) -> str:
    """Return the properties on which a measurement of `device`, a device type, depends."""
    host = f"{cpu_probe.title()}, {usable_cores()} cores, torch {torch.__version__}"
    return host if device == "cpu" else f"{accelerator.name(0)} in {host}"


def load(device: str) -> Calibration | None:
    """Return the measurement of `device` on this machine; None if there is none, or it cannot be read."""
    try:
        document = json.loads(_path(device).read_text())
    except (OSError, ValueError):
        return None
    known = {each.name for each in fields(Calibration)}
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or set(document) != known:
        return None
    try:
        curves = {str(name): _checked(points) for name, points in document.pop("curves").items()}
        constants = {str(name): _positive(value) for name, value in document.pop("constants").items()}
        found = Calibration(curves=curves, constants=constants, **document)
    except (ValueError, TypeError, AttributeError):
        return None
    return found if found.machine == machine(device) else None


def save(device: str, found: Calibration) -> Path:
    """Save `found` for `device` on this machine; return the file."""
    path = _path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(found), indent=1))
    partial.replace(path)
    return path


def forget(device: str) -> None:
    """Remove the measurement of `device`."""
    with contextlib.suppress(FileNotFoundError):
        _path(device).unlink()


def _path(device: str) -> Path:
    return (
        cpu_probe.cache_dir()
        / f"machine-{device}-{hashlib.sha256(machine(device).encode()).hexdigest()[:12]}.json"
    )


def _positive(value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ValueError(f"{value} is not a rate")
    return float(value)


def _checked(points: Any) -> Curve:
    curve = tuple((_positive(x), _positive(y)) for x, y in points)
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(curve))
    if not curve or not rising:
        raise ValueError("a curve must rise")
    return curve
