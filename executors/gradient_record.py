"""Digests of full gradients as plain data, and how two runs differ; `gradient_digest` makes them.

Reads results and event logs without torch, which takes seconds to load.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

BUCKETS = 32


class GradientRecord(BaseModel):
    """Digest of one full gradient."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str
    """SHA-256 of shape and hash."""
    elements: int
    """Numbers of the gradient."""
    digested: int
    """Numbers that ranks have digested; other than `elements` if a piece is missing."""
    norm: float
    sketch: str
    """BUCKETS little-endian float64 numbers in base64."""

    @property
    def projected(self) -> npt.NDArray[np.float64]:
        """Return (BUCKETS,) the sketch.

        Raises:
            ValueError: It is damaged.
        """
        return np.frombuffer(base64.b64decode(self.sketch, validate=True), "<f8", BUCKETS)


def sha256_of_all(each: Mapping[str, GradientRecord]) -> str:
    """Return the SHA-256 of the parameters' names, in order, and the SHA-256 of their gradients."""
    return hashlib.sha256(
        "".join(f"{name} {each[name].sha256}\n" for name in sorted(each)).encode()
    ).hexdigest()


def largest_difference(
    mine: Mapping[str, GradientRecord], theirs: Mapping[str, GradientRecord]
) -> tuple[float, str]:
    """Return the parameter whose gradients differ most, and by how much: 0 if all are bitwise equal.

    Raises:
        ValueError: The parameters of the two differ, a part of a gradient is missing, or a sketch is damaged.
    """
    # A difference is relative to the gradient's norm, or if larger, to the norm that this many numbers
    # of the full gradient have on average: some gradients are zero except for rounding (of a bias
    # before a norm layer).
    if mine.keys() != theirs.keys():
        raise ValueError(f"only one run has a gradient of {sorted(mine.keys() ^ theirs.keys())[0]}")
    for name, each in (*mine.items(), *theirs.items()):
        if each.digested != each.elements:
            raise ValueError(f"{each.digested} numbers of {each.elements} are recorded of {name}'s gradient")
    per_number = math.sqrt(
        sum(each.norm**2 for each in theirs.values()) / max(sum(each.elements for each in theirs.values()), 1)
    )
    worst = (0.0, "")
    for name, other in theirs.items():
        if mine[name].sha256 == other.sha256:
            continue
        # The distance of two sketches estimates that of the gradients (see `gradient_digest`).
        distance = float(np.linalg.norm(mine[name].projected - other.projected))
        scale = max(other.norm, per_number * math.sqrt(other.elements))
        relative = (
            math.inf if math.isnan(distance) else distance / scale if scale else math.inf if distance else 0.0
        )
        worst = max(worst, (relative, name))
    return worst
