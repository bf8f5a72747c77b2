"""The sweep of offload techniques: what is committed is within its bounds, and a row is found again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = json.loads((BENCHMARKS / "results" / "offload-peaks.json").read_text())["rows"]
SPARE_BYTES = 64


def test_committed_peaks_and_bytes_equal_predictions() -> None:
    """Of every technique, on every tier and link."""
    ran = [row for row in ROWS if "off" in row]
    assert {row["technique"] for row in ran} > {
        "optimizer_cpu",
        "l2l",
        "orchestrated",
        "smart_infinity",
        "moesys",
        "mobius",
        "tsplit",
    }
    assert len(ran) > 150
    for row in ran:
        assert row["bytes_equal"], row["name"]
        assert row.get("formula_equal", True), row["name"]
        for tier, wanted in row["predicted"].items():
            assert abs(row["measured"][tier] - wanted) <= max(0.02 * wanted, SPARE_BYTES), (row["name"], tier)
        assert row["within"], row["name"]


@pytest.mark.slow
@pytest.mark.native_ledger
def test_updates_overlapped_with_backward_are_bounded(tmp_path: Path) -> None:
    """For real: how many gradients wait on the host is no race."""
    file = tmp_path / "rows.json"
    asked = [
        sys.executable,
        str(BENCHMARKS / "offload_peaks.py"),
        "per_layer / gpt|harmony / packs",
        "--json",
        str(file),
    ]
    subprocess.run(asked, check=True, env={**os.environ, "MEMTUNE_LEARN": "0"}, timeout=300)
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 3
    assert all(row["within"] and row["bytes_equal"] and row["formula_equal"] for row in rows), rows
