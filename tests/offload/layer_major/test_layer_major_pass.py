"""The layer-major pass: micro-batches in the middle of a group are copied, not written."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.suites.layer_major_suite import CHAIN, tied_chain

from memtune.offload.layer_major import layer_major_pass
from memtune.offload.layer_major.layer_major_pass import _StepWriter, layer_major
from memtune.offload.layer_major.packs import BoundaryTier, Packs, spans
from memtune.program import Phase, Step, accumulate_gradients
from memtune.testing.drift_check import recording_of


def _different(one: Any, other: Any) -> list[str]:
    """Return the names of the fields whose values differ, tables field by field."""
    found = []
    for each in fields(one):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if isinstance(mine, np.ndarray):
            equal = mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
        elif hasattr(mine, "__dataclass_fields__"):
            equal = not _different(mine, theirs)
        else:
            equal = mine == theirs
        found += [] if equal else [each.name]
    return found


def _rows_of_blocks(step: Step) -> int:
    return int((step.ops.phase < Phase.BOUNDARY).sum())


def _step_of(path: Path) -> Step:
    recording = recording_of(path)
    return accumulate_gradients(recording.at(2), kept=recording.keeps_gradients)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied head"])
@pytest.mark.parametrize("boundaries", ["device", "host"])
@pytest.mark.parametrize(
    "packs",
    [
        Packs(spans([2, 2]), spans([2, 2, 2]), prefetch=True),
        Packs(spans([1, 1, 1, 1, 1]), spans([1] * 6), group=7, deferred=(1, 2)),
        Packs((), spans([6])),
    ],
    ids=["pairs", "groups", "one pack"],
)
def test_copied_micro_batches_equal_written_ones(
    packs: Packs, boundaries: BoundaryTier, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, micro_batches = _step_of(tied_chain(tmp_path / "tied.py") if tied else CHAIN), 13
    copied = layer_major(step, packs, micro_batches, boundaries)

    def write_each(self: _StepWriter, group: range, run: Any) -> None:
        for index in group:
            run(index)

    monkeypatch.setattr(layer_major_pass._StepWriter, "_run_each", write_each)
    written = layer_major(step, packs, micro_batches, boundaries)
    assert _different(copied, written) == []
    assert _rows_of_blocks(copied) > 12 * _rows_of_blocks(step)
    copied.validate()
