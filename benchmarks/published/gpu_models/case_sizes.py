"""Sizes of a case, from the environment: `MEMTUNE_CASE` has them as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

SIZES: dict[str, Any] = json.loads(os.environ.get("MEMTUNE_CASE", "{}"))


def whole(name: str, default: int | None = None) -> int:
    """Return a size; raise KeyError if the case has none and there is no default."""
    return int(SIZES[name] if default is None else SIZES.get(name, default))


def real(name: str, default: float) -> float:
    """Return a probability or factor."""
    return float(SIZES.get(name, default))


def word(name: str, default: str = "") -> str:
    """Return a choice."""
    return str(SIZES.get(name, default))
