"""What `memtune doctor --calibrate` found on this machine, kept in the cache directory; it beats the table wherever it speaks."""

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

from memtune import measure
from memtune.cores import usable_cores

SCHEMA = 1

Curve = tuple[tuple[float, float], ...]
"""Points (seconds at the machine's peak rates, seconds that ops of a class took), both rising."""


@dataclass(frozen=True)
class Measured:
    """Constants of one device of this machine, and how long its ops take."""

    machine: str
    """What the figures belong to; others do not use them."""
    date: str
    """Day of the measurement, ISO 8601."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """By field of `Hardware`, in its units."""
    how: Mapping[str, str] = field(default_factory=dict)
    """Of each constant: what was measured."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """By op class."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further figures for people: rates by size, pageable copies, what could not be measured and why."""
    schema: int = SCHEMA

    @property
    def source(self) -> str:
        """What predictions say of numbers from here."""
        return f"measured on this machine {self.date}"


def machine(device: str) -> str:
    """What a measurement of `device` (`cpu`, `cuda`) depends on."""
    host = f"{measure.title()}, {usable_cores()} cores, torch {torch.__version__}"
    return f"{torch.cuda.get_device_name(0)} in {host}" if device == "cuda" else host


def load(device: str) -> Measured | None:
    """What was measured on this machine for `device`; None where nothing was, or it cannot be read."""
    try:
        document = json.loads(_path(device).read_text())
    except (OSError, ValueError):
        return None
    known = {each.name for each in fields(Measured)}
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or set(document) != known:
        return None
    try:
        curves = {str(name): _checked(points) for name, points in document.pop("curves").items()}
        constants = {str(name): _positive(value) for name, value in document.pop("constants").items()}
        found = Measured(curves=curves, constants=constants, **document)
    except (ValueError, TypeError, AttributeError):
        return None
    return found if found.machine == machine(device) else None


def save(device: str, found: Measured) -> Path:
    """Keep `found` for `device` on this machine; returns the file."""
    path = _path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(found), indent=1))
    partial.replace(path)
    return path


def forget(device: str) -> None:
    """Remove what was measured for `device`."""
    with contextlib.suppress(FileNotFoundError):
        _path(device).unlink()


def _path(device: str) -> Path:
    return measure.cache_dir() / f"machine-{device}-{hashlib.sha256(machine(device).encode()).hexdigest()[:12]}.json"


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value} is no rate")
    return float(value)


def _checked(points: Any) -> Curve:
    curve = tuple((_positive(x), _positive(y)) for x, y in points)
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(curve))
    if not curve or not rising:
        raise ValueError("a curve must rise")
    return curve
