"""The committed traces: native loses a fifth of what it reserves on each, stitched memory and a layout next
to nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRACES = sorted((ROOT / "benchmarks" / "traces").glob("*.csv"))
sys.path.insert(0, str(ROOT / "benchmarks"))

import layout_traces  # noqa: E402
from buffer_layout import fault, lay_out  # noqa: E402

from memtune.autotune.predict.caching_allocator import replay  # noqa: E402


def test_traces_are_four() -> None:
    assert len(TRACES) >= 4


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_traces_meet_bars(path: Path) -> None:
    events, buffers = layout_traces.read_trace(path)
    ratio = {}
    for name in ("native", "gmlake"):
        result = replay(events, layout_traces.ALLOCATORS[name], None)
        ratio[name] = result.peak_reserved_bytes / result.peak_allocated_bytes
    assert ratio["native"] >= 1.25
    assert ratio["gmlake"] <= 1.10
    layout = lay_out(buffers, heuristic_s=0.5)
    assert fault(buffers, layout) == ""
    assert layout.height_bytes <= 1.01 * layout.lower_bound_bytes


def test_read_trace_returns_written_trace(tmp_path: Path) -> None:
    events, _ = layout_traces.read_trace(TRACES[0])
    layout_traces.write_trace(events, tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text() == TRACES[0].read_text()
