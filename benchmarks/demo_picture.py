"""Draw the result of `benchmarks/demo.py`, the gain of each search over settings that need none, and write
its figures into the README.

Run `python benchmarks/demo_picture.py`; it reads benchmarks/results/demo-cpu.json and writes demo-cpu.svg and
the part of README.md between two comments.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memtune.autotune.report.svg import BLUE, GREY, ORANGE, Canvas, Picture, Scale

RESULTS = Path(__file__).parent / "results"
RESULT = RESULTS / "demo-cpu.json"
README = Path(__file__).parent.parent / "README.md"
_BEGIN, _END = "<!-- written by benchmarks/demo_picture.py -->\n", "<!-- until here -->\n"
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


def readme(text: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the README's `text` with the config of the first run and the figures of all."""
    before, _, rest = text.partition(_BEGIN)
    part, _, after = rest.partition(_END)
    # Results from before demo.py stored the config leave that of the README.
    block = f"```yaml\n{runs[0]['tuned']}\n```\n" if "tuned" in runs[0] else part[: part.index("```\n") + 4]
    writer = "The first of them" if "tuned" in runs[0] else "An earlier run"
    winners = Counter(run["winner"] for run in runs).most_common()
    chosen = ", ".join(f"`{name}` {_times(count)}" for name, count in winners)
    minutes = _range([run["wall_s"] / 60 for run in runs], 1)
    full, fsdp = (_range([run["times_as_fast_as"][name] for run in runs], 2) for name in _MARKS)
    prose = (
        "`make demo` searches for a GPT of 28.5M parameters on two CPU ranks under 540 MiB each, where it"
        " does not fit unchanged; full recompute and FSDP fit without a search."
        f" {len(runs)} runs on otherwise idle cores chose {chosen}."
        f" {writer} wrote the config above. Search and training took {minutes} minutes a run"
        " ([demo-cpu.json](benchmarks/results/demo-cpu.json); `python benchmarks/demo.py --readme` repeats it"
        f" and writes these lines). Each was {full} times as fast as full recompute:"
    )
    gains = f"{full} times as fast as full recompute, {fsdp} times as fast as plain FSDP"
    picture = f"![{len(runs)} searches: {gains}](benchmarks/results/demo-cpu.svg)\n"
    lines = [block, *wrapped(prose), "", picture]
    return before + _BEGIN + "\n".join(lines) + _END + after


def wrapped(text: str) -> list[str]:
    """Return lines of the README's width; code is not divided."""
    glued = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(glued, 130, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def _range(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def main() -> None:
    """Write the picture next to the result, and the README's part."""
    runs = json.loads(RESULT.read_text())["runs"]
    picture = drawn(runs)
    print(picture.save(RESULTS / "demo-cpu.svg"), picture.description)
    README.write_text(readme(README.read_text(encoding="utf-8"), runs), encoding="utf-8")


if __name__ == "__main__":
    main()
