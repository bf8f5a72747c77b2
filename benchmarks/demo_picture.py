"""Draw the result of `benchmarks/demo.py`: the gain of each search over the settings that need none.

Run `python benchmarks/demo_picture.py`; it reads benchmarks/results/demo-cpu.json and writes demo-cpu.svg.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memtune.autotune.report.svg import BLUE, GREY, ORANGE, Canvas, Picture, Scale

RESULTS = Path(__file__).parent / "results"
_MARKS = {"full recompute": ("circle", BLUE), "plain fsdp": ("square", ORANGE)}


def drawn(runs: Sequence[Mapping[str, Any]]) -> Picture:
    """Return one column per search: samples/s of its setting relative to each baseline."""
    canvas = Canvas(560, 250)
    most = max(max(run["times_as_fast_as"].values()) for run in runs)
    x, y = Scale(0.5, len(runs) + 0.5, 60, 540), Scale(0.0, most * 1.08, 190, 40)
    canvas.axes(x, y, "search", "times as fast", lambda each: f"{each:.0f}", lambda each: f"{each:g}")
    canvas.line(x.start, y(1.0), x.stop, y(1.0), GREY, stroke_dasharray="4 3")
    canvas.text(x.stop, y(1.0) + 14, "as fast as the baseline", "end", fill=GREY)
    for number, run in enumerate(runs, start=1):
        for name, times in run["times_as_fast_as"].items():
            shape, color = _MARKS[name]
            canvas.mark(x(number), y(times), shape, color, hint=f"search {number}: {times:.2f} × {name}")
    canvas.legend(60, 240, [(*mark, f"than {name}") for name, mark in _MARKS.items()])
    ranges = []
    for name in _MARKS:
        times = [run["times_as_fast_as"][name] for run in runs]
        ranges.append(f"{min(times):.2f} to {max(times):.2f} times as fast as {name}")
    return canvas.picture(
        f"{len(runs)} searches of examples/gpt.py on two CPU ranks under 540 MiB",
        f"In {len(runs)} searches the setting found was {', and '.join(ranges)}.",
    )


def main() -> None:
    """Write the picture next to the result."""
    runs = json.loads((RESULTS / "demo-cpu.json").read_text())["runs"]
    picture = drawn(runs)
    print(picture.save(RESULTS / "demo-cpu.svg"), picture.description)


if __name__ == "__main__":
    main()
