"""Dynamic recompute on the DTR artifact's logs: cost against budget by heuristic, and the smallest budget of
each system.

Run with MEMTUNE_DTR_LOGS set: `python benchmarks/recompute_dynamic.py --json out.json --markdown out.md`.
`best`, `megtaichi` and `coop` are what the techniques ship: several options, and at each budget the cheapest.
`--swapping` measures MegTaiChi's choice of swapping alone, and adds it to the results in the JSON file;
`--training gpt --ratio 0.3` trains a model of `predict_models` on this CPU with and without it.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
    HostLink,
    Policy,
    Replay,
    Trace,
    coop_options,
    dtr_options,
    megtaichi_options,
    replay,
)
from memtune.api import apply
from memtune.config import Settings, TunedConfig
from memtune.memory import Ledger
from memtune.program import FOREVER, Action, Tier
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.recompute.megtaichi import Megtaichi
from memtune.testing.drift_check import planned
from memtune.testing.training import build, one_step

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
LINKS = {"12 GB/s": 1 / 12, "1 GB/s": 1.0, "0.02 GB/s": 50.0}
"""Nanoseconds of a byte in each direction: PCIe 3, a shared link, and one on which every copy is too slow."""
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


def swapping(trace: Trace, base: Replay) -> dict[str, list[Any]]:
    """Return by ratio the slowdown of `megtaichi` without swaps and on each link, with the GiB that it swaps.

    Reloads wait: no op hides them.
    """
    ways: dict[str, Options] = {"recomputes": megtaichi_options()}
    exposed = [each for each in megtaichi_options(swap=True) if each.swap != "hidden"]
    for name, rate in LINKS.items():
        link = HostLink(rate, rate, copy_cost=10_000)
        ways[name] = tuple(replace(each, link=link) for each in exposed)
    played = {name: [_at(trace, options, base, ratio) for ratio in RATIOS] for name, options in ways.items()}
    found: dict[str, list[Any]] = {name: [_slowdown(each) for each in done] for name, done in played.items()}
    for name in LINKS:
        found[f"GiB at {name}"] = [
            round(each.swapped_bytes / 2**30, 3) if each.outcome == "done" else None for each in played[name]
        ]
    return found


def trained(model: str, ratio: float, micro_batch: int = 8, steps: int = 7) -> dict[str, Any]:
    """Train on this CPU under `megtaichi` with and without swaps, in turn; return copies, seconds and peaks.

    Peaks are above what training holds between steps.
    """
    path = Path(__file__).parent / "predict_models" / f"{model}.py"
    runs, found = dict[str, Any](), dict[str, Any]()
    for name, swap in (("recomputes", False), ("swaps", True)):
        technique = Megtaichi(ratio=ratio, swap=swap)
        program, plans = planned(path, technique, micro_batch=micro_batch)
        settings = Settings.of(Execution(), {"recompute": technique})
        workload, net, optimizer = build(path)
        tuned = apply(
            net, optimizer, TunedConfig(settings=settings, plan=plans), loss=workload.loss, strict=False
        )
        runs[name] = workload, net, optimizer, tuned
        plan, step = plans["recompute"], program.step
        kept = (step.storages.producer < 0) & (step.storages.held_until == FOREVER)
        kept_bytes = int(step.storages.bytes[kept & (step.storages.tier == Tier.DEVICE)].sum())
        found[name] = {
            "option": plan.option,  # type: ignore[attr-defined]
            "copies": sum(each.action == Action.TO_HOST for each in plan.schedule.steps),  # type: ignore[attr-defined]
            "ops": len(plan.schedule.computes()),  # type: ignore[attr-defined]
            "predicted_more_s": plan.recompute_s,  # type: ignore[attr-defined]
            "predicted_peak_bytes": step.peak_bytes() - kept_bytes,
            "peak_bytes": 0,
            "cpu_s": [],
            "loss": [],
        }
    with Ledger.open("cpu") as ledger:
        for seed in range(steps):
            for name, (workload, net, optimizer, tuned) in runs.items():
                before, start = ledger.live_bytes(), time.process_time()
                ledger.reset_peak()
                loss, gradients = one_step(
                    workload, net, optimizer, tuned, seed=seed, micro_batches=1, size=micro_batch
                )
                found[name]["cpu_s"].append(time.process_time() - start)
                found[name]["loss"].append(float(loss))
                found[name]["peak_bytes"] = ledger.peak_allocated_bytes() - before
                del gradients
    for each in found.values():
        each["cpu_s"] = round(statistics.median(each["cpu_s"][2:]), 4)
    found["equal"] = found["recomputes"].pop("loss") == found["swaps"].pop("loss")
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


def _write(path: Path | None, results: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps({"ratios": RATIOS, "logs": results}, indent=1) + "\n")


def main() -> None:
    """Measure every log in the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--swapping", action="store_true")
    parser.add_argument("--training", metavar="MODEL")
    parser.add_argument("--ratio", type=float, default=0.3)
    args = parser.parse_args()
    if args.training:
        print(json.dumps(trained(args.training, args.ratio), indent=1))
        return
    results: dict[str, Any] = json.loads(args.json.read_text())["logs"] if args.swapping else {}
    for name in dtr_logs.names():
        trace = dtr_logs.load(name)
        base = replay(trace, replace(ARTIFACT, release="banish"))
        if args.swapping:
            results[name]["swapping"] = swapping(trace, base)
            print(name, results[name]["swapping"], flush=True)
            _write(args.json, results)
            continue
        results[name] = {
            "ops": len(trace.op_cost),
            "base_peak_bytes": base.peak_bytes,
            "curves": curves(trace, base),
            "chosen": choosing(trace, base),
            "smallest": {system: smallest(trace, policy, base) for system, policy in SYSTEMS.items()},
            "swapping": swapping(trace, base),
        }
        print(
            name,
            {system: found["percent"] for system, found in results[name]["smallest"].items()},
            flush=True,
        )
        _write(args.json, results)
    if not results:
        print(f"no logs: {dtr_logs.VARIABLE} does not say where the DTR artifact's logs are")
        return
    if args.markdown:
        svg = args.markdown.with_suffix(".svg")
        svg.write_text(plot(RATIOS, results))
        args.markdown.write_text(markdown(RATIOS, results, svg.name))


if __name__ == "__main__":
    main()
