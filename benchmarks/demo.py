"""Repeat `make demo`: correctness, duration and speed-up of each run.

    python benchmarks/demo.py [--runs 10] [--json FILE] [--readme]

`--readme` writes results/demo-cpu.json, then its picture and the README's part about it, by demo_picture.py.
Each run has a study of its own; the machine should be idle otherwise. A run is right if the plain setting
does not fit, at least eight trials ran, the tuned setting fits the limit, no measured setting that fits is
faster by more than the spread, the loss fell, and it took under five minutes. Ratios are of samples per
second in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import demo_picture

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S, LEAST_TRIALS = 300.0, 8


def one_run(place: Path) -> dict[str, Any]:
    """Run `make demo` in `place`; return its row, with what was wrong."""
    words = [f"DEMO_OUT={place}/tuned.yaml", f"DEMO_ARGS=--study {place}/study"]
    start = time.monotonic()
    done = subprocess.run(["make", "-s", "demo", *words], cwd=ROOT, capture_output=True, text=True)
    wall_s = time.monotonic() - start
    if done.returncode:
        said = "\n".join(
            (done.stdout, done.stderr, tuned.read_text() if (tuned := place / "tuned.yaml").exists() else "")
        )
        (kept := Path(tempfile.gettempdir(), f"demo-failed-{os.getpid()}-{place.name}.log")).write_text(said)
        return {"wall_s": round(wall_s, 1), "wrong": [f"exit {done.returncode}: {kept}"]}
    events = [json.loads(line) for line in (place / "study" / "events.jsonl").read_text().splitlines()]
    fell = re.search(r"loss ([\d.]+) → ([\d.]+) over", done.stdout)
    losses = [float(each) for each in fell.groups()] if fell else [0.0, 0.0]
    return {
        **judged(events, losses, wall_s),
        "tuned": settings_and_measured((place / "tuned.yaml").read_text()),
    }


def settings_and_measured(tuned: str) -> str:
    """Return the sections `settings` and `measured` of a config, with the comments of the settings."""
    lines = tuned.splitlines()
    first = lines.index("settings:")
    last = next(number for number, line in enumerate(lines) if line.startswith("measured:"))
    return "\n".join([*lines[first:last], lines[last].partition("  #")[0]])


def judged(events: list[dict[str, Any]], losses: list[float], wall_s: float) -> dict[str, Any]:
    """Return the result row of one run from its event log."""
    budget = next(each["budget_bytes"] for each in events if each["event"] == "search_started")
    trials = [each for each in events if each["event"] == "trial_finished"]
    baselines = {each["name"]: each["summary"] for each in trials if each["role"] == "baseline"}
    end = events[-1]
    won = next(each["summary"] for each in trials if each["number"] == end["best_number"])
    steps: dict[str, list[float]] = defaultdict(list)
    for each in trials:
        if each["result"]["status"] == "ok":
            steps[each["summary"]] += each["result"]["step_s_all"]
    median_s = {name: statistics.median(times) for name, times in steps.items()}
    spread_s = {name: (max(times) - min(times)) / 2 for name, times in steps.items()}
    peak = max(each["result"]["peak_reserved_bytes"] or 0 for each in trials if each["summary"] == won)
    faster = [name for name in median_s if median_s[name] + spread_s[name] + spread_s[won] < median_s[won]]
    # A plain setting that is predicted not to fit does not run.
    plain_status = next((each["result"]["status"] for each in trials if each["name"] == "plain"), "oom")
    wrong = {
        f"plain is {plain_status}": plain_status != "oom",
        f"only {len(trials)} trials": len(trials) < LEAST_TRIALS,
        f"{peak} bytes do not fit into {budget}": peak > budget,
        f"faster than the winner: {', '.join(faster)}": bool(faster),
        "not confirmed": not end["confirmed"],
        f"loss {losses[0]} to {losses[1]}": losses[1] >= losses[0],
        f"took {wall_s:.0f} s": wall_s > LIMIT_S,
    }
    return {
        "wall_s": round(wall_s, 1),
        "trials": len(trials),
        "winner": won,
        "peak_of_limit": round(peak / budget, 3),
        "times_as_fast_as": {
            name: round(median_s[of] / median_s[won], 3) for name, of in baselines.items() if of in median_s
        },
        "times_as_fast_as_next": round(
            min(each for name, each in median_s.items() if name != won) / median_s[won], 3
        ),
        "losses": losses,
        "wrong": [what for what, holds in wrong.items() if holds],
    }


def main() -> None:
    """Run, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    parser.add_argument("--readme", action="store_true", help="write the committed result, picture and text")
    options = parser.parse_args()
    if options.readme:
        options.json = demo_picture.RESULT
    rows = []
    for number in range(options.runs):
        with tempfile.TemporaryDirectory() as place:
            rows.append(one_run(Path(place)))
        print(number + 1, json.dumps(rows[-1], ensure_ascii=False), flush=True)
        if options.json:
            options.json.write_text(
                json.dumps({"right": right(rows), "runs": rows}, indent=1, ensure_ascii=False) + "\n"
            )
    print(f"{right(rows)} right")
    if options.readme:
        demo_picture.main()
    raise SystemExit(any(row["wrong"] for row in rows))


def right(rows: list[dict[str, Any]]) -> str:
    """Return how many runs were right."""
    return f"{sum(not row['wrong'] for row in rows)} of {len(rows)}"


if __name__ == "__main__":
    main()
