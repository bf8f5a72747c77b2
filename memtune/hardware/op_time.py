"""The time of a class of ops as plain data, which results and event logs have: read without torch."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field


class OpTime(BaseModel):
    """Ops of one class and similar size in one step; figures are averages per op."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    op_class: str
    dtype: str
    flops: float = Field(ge=0)
    traffic_bytes: float = Field(ge=0)
    seconds: float = Field(gt=0)
    """Share of the time of a step that runs without the clock."""
    count: int = Field(ge=1)
    ranks: int = Field(default=1, ge=1)
    """Processes on the machine."""


def half_decade(value: float) -> int:
    """Return the number of the half decade of a `value` above 0: ops in the same one are of similar size."""
    return math.floor(2 * math.log10(value))
