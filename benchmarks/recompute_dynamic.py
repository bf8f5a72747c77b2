"""Dynamic recompute on the DTR artifact's logs: cost against budget by heuristic, and the smallest budget of
each system.

Run with MEMTUNE_DTR_LOGS set: `python benchmarks/recompute_dynamic.py --json out.json --markdown out.md`.
`best`, `megtaichi` and `coop` are what the techniques ship: several options, and at each budget the cheapest.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import dtr_logs
from recompute_report import markdown, plot

from memtune.activations.eviction.policy import (
    COOP,
    DTR,
    MEGTAICHI,
    Policy,
    Replay,
    Trace,
    coop_options,
    dtr_options,
    megtaichi_options,
    replay,
)

RATIOS = tuple(step / 10 for step in range(10, 0, -1))
ARTIFACT = Policy()
"""The artifact's policy: evicted storages that were recomputed remain in the pool."""
Options = tuple[Policy, ...]
HEURISTICS: dict[str, Policy | Options] = {
    "e*": replace(ARTIFACT, neighbours="closure"),
    "classes": ARTIFACT,
    "local": replace(ARTIFACT, neighbours="own"),
    "LRU": replace(ARTIFACT, neighbours="nothing", by_size=False),
    "size": replace(ARTIFACT, neighbours="nothing", by_staleness=False),
    "MSPS": replace(ARTIFACT, neighbours="ancestors", by_staleness=False),
    "random": replace(ARTIFACT, random=True, seed=1),
    "sampled": replace(ARTIFACT, sample=True, ignore_small=0.01, seed=1),
    "until used": DTR,
    "best": dtr_options(),
}
SYSTEMS: dict[str, Policy | Options] = {
    "dtr": replace(ARTIFACT, addressed=True),
    "dtr, best fit": replace(ARTIFACT, addressed=True, best_fit=True),
    "dtr, until used": replace(DTR, addressed=True),
    "megtaichi": megtaichi_options(),
    "coop": coop_options(),
    "megtaichi, one score": MEGTAICHI,
    "coop, first fit": COOP,
    "megtaichi, classes": replace(MEGTAICHI, neighbours="classes"),
    "coop, 2 groups": replace(COOP, groups=2),
}
COST_LIMIT = 5.0
_PERCENTS = (100, 95, 90, 85, 80, 75, 70, 65, *range(60, 4, -1))
"""Budgets tried in turn for the smallest one, of the plain peak."""


def curves(trace: Trace, base: Replay) -> dict[str, list[float | None]]:
    """Return the slowdown by ratio for each heuristic with a byte counter, None where it fails."""
    return {
        name: [_slowdown(_at(trace, played, base, ratio)) for ratio in RATIOS]
        for name, played in HEURISTICS.items()
    }


def choosing(trace: Trace, base: Replay) -> dict[str, list[Any]]:
    """Return by ratio the option of `dtr` that is chosen, and the seconds that playing all of them takes."""
    found: dict[str, list[Any]] = {"option": [], "seconds": []}
    for ratio in RATIOS:
        start = time.perf_counter()
        policy, done = _cheapest(trace, dtr_options(), base, ratio)
        found["option"].append(policy.option if done.outcome == "done" else None)
        found["seconds"].append(round(time.perf_counter() - start, 2))
    return found


def smallest(trace: Trace, played: Policy | Options, base: Replay) -> dict[str, Any]:
    """Return the smallest budget above which all budgets work, in hundredths of the plain peak, and the mean
    fragmentation up to there.
    """
    lowest, shares, start = 100, list[float](), time.perf_counter()
    for percent in _PERCENTS:
        done = _at(trace, played, base, percent / 100)
        if done.outcome != "done":
            break
        lowest = percent
        if done.searches:
            shares.append(done.fragmentation)
    return {
        "percent": lowest,
        "fragmentation": round(sum(shares) / max(len(shares), 1), 4),
        "fragmentation_at_smallest": round(shares[-1], 4) if shares else 0.0,
        "slowdown_at_half": _slowdown(_at(trace, played, base, 0.5)),
        "search_s": round(time.perf_counter() - start, 1),
    }


def _at(trace: Trace, played: Policy | Options, base: Replay, ratio: float) -> Replay:
    if isinstance(played, tuple):
        return _cheapest(trace, played, base, ratio)[1]
    budget, limit = int(base.peak_bytes * ratio), COST_LIMIT * base.first_cost
    return replay(trace, played, budget, settle=True, cost_limit=limit)


def _cheapest(trace: Trace, options: Options, base: Replay, ratio: float) -> tuple[Policy, Replay]:
    budget, limit = int(base.peak_bytes * ratio), COST_LIMIT * base.first_cost
    return dtr_logs.replay_cheapest(trace, options, budget, settle=True, cost_limit=limit)


def _slowdown(done: Replay) -> float | None:
    return round(done.slowdown, 4) if done.outcome == "done" else None


def main() -> None:
    """Measure every log in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in dtr_logs.names():
        trace = dtr_logs.load(name)
        base = replay(trace, replace(ARTIFACT, release="banish"))
        results[name] = {
            "ops": len(trace.op_cost),
            "base_peak_bytes": base.peak_bytes,
            "curves": curves(trace, base),
            "chosen": choosing(trace, base),
            "smallest": {system: smallest(trace, policy, base) for system, policy in SYSTEMS.items()},
        }
        print(
            name,
            {system: found["percent"] for system, found in results[name]["smallest"].items()},
            flush=True,
        )
        if args.json:
            args.json.write_text(json.dumps({"ratios": RATIOS, "logs": results}, indent=1) + "\n")
    if not results:
        print(f"no logs: {dtr_logs.VARIABLE} does not say where the DTR artifact's logs are")
        return
    if args.markdown:
        svg = args.markdown.with_suffix(".svg")
        svg.write_text(plot(RATIOS, results))
        args.markdown.write_text(markdown(RATIOS, results, svg.name))


if __name__ == "__main__":
    main()
