"""The cases of `predict.py`: every model of `predict_models/` under every recompute, offload and batch.

Committed before the first measurement; models and settings are added here, never removed because their error
is large.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = tuple(sorted((Path(__file__).parent / "predict_models").glob("*.py")))
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": {"kind": "full"}},
    "every_nth": {"recompute": {"kind": "every_nth", "n": 2}},
    "selective": {"recompute": {"kind": "selective"}},
}
OFFLOAD: dict[str, dict[str, Any]] = {
    "none": {},
    "copy_out": {"offload": {"activations": {"kind": "copy_out"}}},
    "optimizer_cpu": {"offload": {"states": {"kind": "optimizer_cpu"}}},
}
BATCHES = (3, 8)
"""Neither is one of the two micro-batches from which sizes are extrapolated."""


@dataclass(frozen=True)
class Case:
    """One model under one setting at one micro-batch."""

    model: Path
    recompute: str
    offload: str
    batch: int

    @property
    def plain(self) -> bool:
        """True if neither recompute nor offload is set."""
        return self.recompute == self.offload == "none"

    def config(self) -> dict[str, Any]:
        """Return the TunedConfig document of both prediction and trial."""
        execution = {"micro_batch": self.batch, "accumulate": 1}
        return {"settings": {"execution": execution, **RECOMPUTE[self.recompute], **OFFLOAD[self.offload]}}


def cases(model: Path) -> Iterator[Case]:
    """Return all cases of one model."""
    for recompute, offload, batch in itertools.product(RECOMPUTE, OFFLOAD, BATCHES):
        yield Case(model, recompute, offload, batch)
