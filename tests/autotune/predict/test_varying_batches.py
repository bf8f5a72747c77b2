"""Intervals of peaks where batches vary in size, against recordings of smaller and larger batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from memtune import hardware
from memtune.autotune.predict.prediction import Prediction
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.technique import Reason, Target
from memtune.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
VARYING = (Path(__file__).parents[2] / "support" / "models" / "varying_lengths.py").read_text()
SIZE, TOKEN_BYTES = 4, 8
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"recompute": {"kind": "full"}},
    "copy_out": {"offload": {"activations": {"kind": "copy_out", "min_bytes": 1024}}},
    "accumulate": {"execution": {"micro_batch": SIZE, "accumulate": 2}},
}


def rewriter_of(file: Path, text: str) -> Rewriter:
    file.write_text(text)
    return Rewriter(record(Workload.load(file)), Target(hardware.detect("cpu")))


def predictions(rewriter: Rewriter) -> dict[str, Prediction]:
    found = {}
    for name, settings in SETTINGS.items():
        program = rewriter.program(Choice.from_document({"execution": {"micro_batch": SIZE}} | settings))
        assert not isinstance(program, Reason), program
        found[name] = simulate(program, rewriter.target.hardware, level="events")
    return found


def of_length(folder: Path, length: int) -> dict[str, Prediction]:
    text = f"{VARYING}\ndef worst_batch(size): return batch_of(size, {length})\n"
    return predictions(rewriter_of(folder / f"of_{length}.py", text))


def test_interval_of_the_peak_reaches_half_the_spread_of_drawn_batches(tmp_path: Path) -> None:
    rewriter = rewriter_of(tmp_path / "varying.py", VARYING)
    found = predictions(rewriter)
    (note,) = (each for each in rewriter.recording.notes if each.startswith("batches vary in size"))
    least, most = (int(each) // TOKEN_BYTES // SIZE for each in re.findall(r"\d+", note)[:2])
    assert 8 <= least < most < 64
    half = (most - least) // 2
    same, smaller, larger = (of_length(tmp_path, each) for each in (most, most - half, most + half))
    for name, prediction in found.items():
        peak = prediction.peak_allocated_bytes
        assert peak == same[name].peak_allocated_bytes, name
        assert same[name].batch_spread_bytes == (0, 0)
        below, above = prediction.batch_spread_bytes
        assert peak - below == pytest.approx(smaller[name].peak_allocated_bytes, rel=0.03), name
        if name == "copy_out":  # a larger batch has more tensors that are worth a copy
            assert peak + above > larger[name].peak_allocated_bytes
        else:
            assert peak + above == pytest.approx(larger[name].peak_allocated_bytes, rel=0.03), name
        low, high = prediction.interval[:2]
        assert low < smaller[name].peak_allocated_bytes, name
        assert high > larger[name].peak_allocated_bytes, name
        for bounds in (prediction.allocated_bytes, prediction.reserved_bytes, prediction.device_bytes):
            assert bounds[1] <= bounds[0] - below, name
            assert bounds[2] >= bounds[0] + above, name


def test_interval_of_the_peak_at_a_micro_batch_that_was_not_drawn_has_the_spread_of_the_next_smaller(
    tmp_path: Path,
) -> None:
    recording = rewriter_of(tmp_path / "varying.py", VARYING).recording
    assert recording.batch_range(64) == recording.batch_range(4) == recording.batch_factors[4]
    low, high = recording.batch_range(4)
    assert low < 1 < high
