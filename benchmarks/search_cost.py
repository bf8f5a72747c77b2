"""CPU and wall seconds of a search by phase: what recording, scoring and starting processes cost.

    python benchmarks/search_cost.py [CASE ...] [--repeats 1] [--json FILE] [--markdown FILE]

Each case is one `memtune search` on this CPU as a user types it, with caches as they are. CPU seconds come
from /proc, sampled every 20 ms for the search and all its descendants, and are attributed to the phase of the
search's own process, or to the part of a trial: `start` until its first step begins (process, model, apply),
`steps` (warm-up and measured), `rates` (op times and machine rates, first trials only). The last 20 ms of a
process may be missing.

`record_and_score_s` is the CPU time of recording, checking the batch and scoring, with all processes that
take part; `overhead` is all time outside the steps over that of the steps. The best of the repeats counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).parents[1]
MODELS = Path(__file__).parent / "search_models"
_SAMPLE_S = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")
_RECORD_AND_SCORE = ("record", "check batch", "score")
Clock = Literal["cpu_s", "wall_s"]


class Case(NamedTuple):
    """A search: the model's environment, and the arguments of `memtune search`."""

    environment: dict[str, str]
    arguments: list[str]


CASES = {
    "mlp": Case({}, [str(MODELS / "mlp.py"), "--workers", "1", "--trials", "4"]),
    "mlp-2": Case({}, [str(MODELS / "mlp.py"), "--workers", "2", "--trials", "4"]),
    "tiny": Case(
        {"MEMTUNE_GPT_SIZE": "tiny"},
        ["examples/gpt.py", "--workers", "1", "--trials", "4", "--max-memory", "20MB"],
    ),
    "tiny-2": Case(
        {"MEMTUNE_GPT_SIZE": "tiny"},
        ["examples/gpt.py", "--workers", "2", "--trials", "4", "--max-memory", "20MB"],
    ),
    "30m": Case(
        {"MEMTUNE_GPT_SIZE": "30m"},
        ["examples/gpt.py", "--workers", "2", "--trials", "4", "--max-memory", "540MiB"],
    ),
}
"""The last one has steps of more than a second."""

_PHASES = {
    "looking at the file": "probe",
    "recording one training step": "record",
    "checking that micro-batches add up to the batch": "check batch",
    "scoring settings": "score",
}


# -- the search, in a process of its own ---------------------------------------------------------------------


def run_search(arguments: list[str], marks: int) -> int:
    """Run `memtune search` and write a JSON line to the descriptor `marks` at each change of phase."""

    def mark(phase: str) -> None:
        os.write(marks, (json.dumps([time.monotonic(), phase]) + "\n").encode())

    mark("import")
    from memtune.cli import run
    from memtune.progress import Progress

    phase = Progress.phase

    def on_phase(self: Progress, text: str) -> None:
        if text in _PHASES:
            mark(_PHASES[text])
        if text == "looking at the file":
            _mark_events(mark)
        phase(self, text)

    Progress.phase = on_phase  # type: ignore[method-assign]
    return run(["search", *arguments, "--device", "cpu", "--no-tui", "--force"])


def _mark_events(mark: Any) -> None:
    from memtune.autotune.search import search_events

    write = search_events.EventLog.write

    def marked(self: Any, event: Any) -> Any:
        if isinstance(event, search_events.TrialStarted):
            mark("wait for trials")
        elif isinstance(event, search_events.TrialProgress):
            mark(f"stage {event.stage}")
        elif isinstance(event, search_events.TrialFinished):
            mark("propose and record")
        elif isinstance(event, search_events.SearchFinished):
            mark("end")
        return write(self, event)

    search_events.EventLog.write = marked  # type: ignore[method-assign]


# -- watching it ---------------------------------------------------------------------------------------------


@dataclass
class Watcher:
    """CPU time of a process and its descendants, sampled until `stop`."""

    root: int
    samples: dict[tuple[int, str], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By pid and part: (time, CPU seconds so far)."""
    parts: dict[int, str] = field(default_factory=dict)
    stopped: bool = False

    def watch(self) -> None:
        """Sample every `_SAMPLE_S` until `stopped`."""
        while not self.stopped:
            self._sample()
            time.sleep(_SAMPLE_S)

    def _sample(self) -> None:
        now, found = time.monotonic(), {}
        for each in os.listdir("/proc"):
            if not each.isdecimal():
                continue
            try:
                fields = Path("/proc", each, "stat").read_text().rpartition(")")[2].split()
                found[int(each)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / _TICKS
            except OSError:
                continue
        for pid, (parent, cpu_s) in sorted(found.items()):
            part = self._part(pid, parent)
            if part is not None:
                self.samples[pid, part].append((now, cpu_s))

    def _part(self, pid: int, parent: int) -> str | None:
        if pid not in self.parts:
            above = "search" if parent == self.root else self.parts.get(parent)
            if pid == self.root:
                self.parts[pid] = "search"
            elif above is None:
                return None
            else:
                self.parts[pid] = _part_of(pid, above)
        return self.parts[pid]


def _part_of(pid: int, above: str) -> str:
    """Return what a process is, by its command line and its parent; a fork has its parent's command line."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        command = ""
    if above == "fork server":
        return "supervisor"
    if above in ("supervisor", "rank") or "executors.worker" in command:
        return "rank"
    for word, part in (
        ("fork_server", "fork server"),
        ("supervisor.py", "supervisor"),
        ("preflight", "probe"),
    ):
        if word in command:
            return part
    return "search"  # its scoring copies, and helpers that measure kernels


def timed(case: Case) -> dict[str, Any]:
    """Run a search once; return its CPU and wall seconds by phase."""
    with tempfile.TemporaryDirectory() as folder:
        reading, writing = os.pipe()
        command = [sys.executable, __file__, "--search", str(writing), *case.arguments]
        command += ["--study", f"{folder}/study", "--out", f"{folder}/tuned.yaml"]
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **case.environment},
            pass_fds=(writing,),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        os.close(writing)
        watcher = Watcher(process.pid)
        thread = threading.Thread(target=watcher.watch)
        thread.start()
        with os.fdopen(reading) as lines:
            marks = [(float(at), str(phase)) for at, phase in map(json.loads, lines)]
        _, error = process.communicate()
        ended = time.monotonic()
        watcher.stopped = True
        thread.join()
        if process.returncode:
            raise SystemExit(error.decode())
        events = [json.loads(line) for line in Path(folder, "study", "events.jsonl").read_text().splitlines()]
    trials = [each["result"] for each in events if each["event"] == "trial_finished"]
    scored = next(each for each in events if each["event"] == "candidates_scored")
    return {
        **_phases([(began, "import"), *marks, (ended, "")], watcher),
        "trials": len(trials),
        "candidates": scored["n_candidates"],
        "step_s": min(each["step_s"] for each in trials if each["status"] == "ok"),
        "load": round(os.getloadavg()[0], 1),
    }


def _phases(marks: list[tuple[float, str]], watcher: Watcher) -> dict[str, Any]:
    """Return seconds by phase of the search's process and by part of the trials."""
    own: list[tuple[float, str]] = []
    stages: list[tuple[float, str]] = []
    for at, phase in marks:
        if phase.startswith("stage "):
            stages.append((at, _trial_part(phase.removeprefix("stage "))))
        else:
            own.append((at, phase))
            stages.append((at, "trial: start"))
    cpu_s: dict[str, float] = defaultdict(float)
    for (_, part), samples in watcher.samples.items():
        for (_, before), (at, after) in zip([(0.0, 0.0), *samples], samples, strict=False):
            if part in ("search", "probe"):
                phase = _at(own, at)
            elif part == "rank":
                phase = _at(stages, at)
            else:
                phase = part
            cpu_s[phase] += after - before
    wall_s: dict[str, float] = defaultdict(float)
    for (at, phase), (until, _) in itertools.pairwise(own):
        if phase != "wait for trials":
            wall_s[phase] += until - at
    for (at, part), (until, _) in itertools.pairwise(stages):
        if _at(own, at) == "wait for trials":
            wall_s[part] += until - at
    return {
        "cpu_s": _rounded(cpu_s),
        "wall_s": _rounded(wall_s),
        "total_wall_s": round(marks[-1][0] - marks[0][0], 1),
    }


def _trial_part(stage: str) -> str:
    if stage.startswith("timing"):
        return "trial: rates"
    return "trial: steps" if "step " in stage else "trial: start"


def _at(marks: list[tuple[float, str]], at: float) -> str:
    return next((phase for since, phase in reversed(marks) if since <= at), marks[0][1])


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(each, 2) for name, each in seconds.items()}


def row_of(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a case: its best run by CPU time, and ratios."""
    best = min(runs, key=lambda run: sum(run["cpu_s"].values()))
    ratios = {}
    for clock in ("cpu_s", "wall_s"):
        # Steps of a few milliseconds are shorter than the ticks of /proc: the ratio is unknown.
        steps = best[clock].get("trial: steps", 0.0)
        ratios[clock] = round((sum(best[clock].values()) - steps) / steps, 3) if steps else None
    recorded = sum(best["cpu_s"].get(phase, 0.0) for phase in _RECORD_AND_SCORE)
    arguments = [each.replace(f"{ROOT}/", "") for each in CASES[name].arguments]
    return {
        "case": name,
        "search": arguments,
        "record_and_score_s": round(recorded, 2),
        "overhead": ratios,
        **best,
        "runs": [{"cpu_s": round(sum(run["cpu_s"].values()), 2), "load": run["load"]} for run in runs],
    }


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the result as text."""
    phases = list(dict.fromkeys(phase for row in rows for phase in row["cpu_s"]))
    out = [
        "# Cost of a search",
        "",
        "`benchmarks/search_cost.py`; CPU seconds of all processes, by phase.",
        "",
        "| | " + " | ".join(row["case"] for row in rows) + " |",
        "|---" * (len(rows) + 1) + "|",
    ]
    out += [
        f"| {phase} | " + " | ".join(f"{row['cpu_s'].get(phase, 0):.1f}" for row in rows) + " |"
        for phase in phases
    ]
    figures: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("record, check batch, score", lambda row: f"**{row['record_and_score_s']:.1f}**"),
        ("candidates", lambda row: f"{row['candidates']:,}"),
        ("trials", lambda row: str(row["trials"])),
        ("fastest step, ms", lambda row: f"{1e3 * row['step_s']:.0f}"),
        ("CPU outside steps / in steps", lambda row: _ratio(row["overhead"]["cpu_s"])),
        ("wall outside steps / in steps", lambda row: _ratio(row["overhead"]["wall_s"])),
    )
    for title, value in figures:
        out.append(f"| {title} | " + " | ".join(value(row) for row in rows) + " |")
    return "\n".join([*out, ""])


def main() -> None:
    """Time the requested searches; print one table, or write one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all where none is given"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    rows = [row_of(name, [timed(CASES[name]) for _ in range(asked.repeats)]) for name in asked.cases or CASES]
    print(markdown(rows))
    if asked.json:
        about = {"schema": 1, "cores": len(os.sched_getaffinity(0))}
        asked.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--search"]:
        sys.exit(run_search(sys.argv[3:], int(sys.argv[2])))
    main()
