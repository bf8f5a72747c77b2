"""Regret of the setting that a search ships after a few trials, on step times measured on this CPU.

    python benchmarks/search_quality_cpu.py make CASE [--folder DIR]
    python benchmarks/search_quality_cpu.py measure CASE [--rounds 3] [--folder DIR]
    python benchmarks/search_quality_cpu.py replay [--draws 20] [--json FILE] [--markdown FILE]

`make` writes `DIR/CASE.json`: the settings with the best predictions, the best one of every technique, and
the baselines, all within the budget. A baseline runs first, with the clocks of a search's first trial, and
what it measured corrects the predictions. `measure` runs every setting of the pool in a process of its own,
in alternating rounds, and adds the times; the machine should be idle.

`replay` searches the stored pools: a trial draws one of the rounds of its setting, and regret is the median
of the shipped setting's rounds over that of the best one's, minus 1. Searchers and shipping rules are those
of `search_quality.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from search_quality import SEARCHERS, TRIALS, Trials, shipped

from memtune.autotune.predict import Prediction
from memtune.autotune.predict.simulation import Interval
from memtune.autotune.predict.time_breakdown import OpTime
from memtune.autotune.search.baselines import baselines
from memtune.autotune.search.driver import trial_config
from memtune.autotune.search.preparation import prepare
from memtune.autotune.search.trials import make_executor
from memtune.autotune.space import Choice, Scored, SearchOptions, kinds, predict_again
from memtune.executors import Executor, Trial, TrialResult
from memtune.units import format_seconds

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results" / "search-quality-cpu"
_POOL = 16
_MEASURE_S = 1.0
_STEPS = (3, 12)
_SEARCHERS = ("memtune", "predictions in order", "random", "TPE", "full + fsdp by hand")


class Case(NamedTuple):
    """A workload on this machine; the budget is a fraction of the peak of the plain step, None without."""

    model: str
    ranks: int
    budget: float | None
    environment: dict[str, str]


def _gpt(**values: int) -> dict[str, str]:
    return {f"MEMTUNE_GPT_{name}": str(value) for name, value in values.items()}


_DEEP = _gpt(LAYERS=12, DIM=192, SEQ=64, BATCH=8)
_WIDE = _gpt(LAYERS=3, DIM=512, SEQ=32, BATCH=4)
_LONG = _gpt(LAYERS=4, DIM=128, SEQ=512, BATCH=4)
_MODELS = "benchmarks/predict_models"
CASES = {
    f"{name}-{ranks}r-{budget or 1:.0%}".replace("%", ""): Case(model, ranks, budget, environment)
    for name, model, environment in (
        ("gpt-deep", "examples/gpt.py", _DEEP),
        ("gpt-wide", "examples/gpt.py", _WIDE),
        ("gpt-long", "examples/gpt.py", _LONG),
        ("vit", f"{_MODELS}/vit.py", {}),
        ("lora", f"{_MODELS}/lora.py", {}),
        ("moe", f"{_MODELS}/moe.py", {}),
        ("bert", f"{_MODELS}/bert.py", {}),
        ("convnext", f"{_MODELS}/convnext.py", {}),
    )
    for ranks in (1, 2)
    for budget in (0.5, 0.8, None)
}


def make(name: str) -> dict[str, Any]:
    """Return the pool of a case, with predictions before and after the first trial."""
    case = CASES[name]
    os.environ.update(case.environment)
    options = SearchOptions(workload=str(ROOT / case.model), device="cpu", ranks=case.ranks)
    setup = prepare(options)
    plain = baselines(setup.scorer, setup.global_batch)[0][0].scored
    budget = case.budget and round(case.budget * setup.scorer.refined(plain).prediction.peak_allocated_bytes)
    if budget is not None:
        setup = prepare(replace(options, budget_bytes=budget))
    scores = setup.score(0)
    fits = [each for each in scores.by_key.values() if _fits(each, budget)]
    fits.sort(key=lambda each: each.rank("throughput"))
    best_of_kind = {kind: each for each in reversed(fits) for kind in kinds(each.choice)}
    known = [each for each in baselines(setup.scorer, setup.global_batch)[0] if _fits(each.scored, budget)]
    wanted = [*(each.scored for each in known), *fits[:_POOL], *best_of_kind.values()]
    pool = {each.key: setup.scorer.refined(each) for each in {one.key: one for one in wanted}.values()}
    pool = {key: each for key, each in pool.items() if _fits(each, budget)}
    before = {key: each.prediction.step_s for key, each in pool.items()}
    found: dict[str, Any] = {
        "case": name,
        "budget_bytes": budget,
        "hardware": setup.hardware.title,
        "baselines": {each.scored.key: each.name for each in known},
        "settings": [
            {
                "key": key,
                "config": trial_config(setup, each.choice).document(),
                "summary": each.choice.summary,
                "status": "ok",
                "step_s": [],
                "other_load": [],
                "predicted_before_s": before[key],
                "prediction": _plain(each.prediction),
            }
            for key, each in pool.items()
        ],
    }
    first = min((each.scored.key for each in known), key=lambda key: before[key])
    row = next(each for each in found["settings"] if each["key"] == first)
    executor = make_executor("local", device="cpu", ranks=case.ranks)
    try:
        taught = _run(executor, found, row, clock_ops=True)
    finally:
        executor.close()
    setup.scorer.learn(taught.op_times, taught.rates)
    predict_again(pool, setup.scorer)
    for each in found["settings"]:
        each["prediction"] = _plain(pool[each["key"]].prediction)
    return found | {"first": first, "rates": taught.rates, "other_load": taught.other_load}


def measure(found: dict[str, Any], keep: Callable[[], None]) -> None:
    """Run every setting of a pool once more that has not failed; `keep` writes the pool after each."""
    case = CASES[found["case"]]
    os.environ.update(case.environment)
    executor = make_executor("local", device="cpu", ranks=case.ranks)
    least = min(len(each["step_s"]) for each in found["settings"] if each["status"] == "ok")
    try:
        for row in found["settings"]:
            if row["status"] != "ok" or len(row["step_s"]) > least:
                continue
            result = _run(executor, found, row)
            row["status"] = result.status
            if result.step_s is None:
                row["reason"] = result.reason
            else:
                row["peak_bytes"] = result.peak_allocated_bytes
                row["step_s"].append(result.step_s)
                row["other_load"].append(round(result.other_load, 3))
            keep()
    finally:
        executor.close()


def _fits(scored: Scored, budget: int | None) -> bool:
    return budget is None or scored.prediction.peak_allocated_bytes <= budget


def _run(
    executor: Executor, found: dict[str, Any], row: dict[str, Any], *, clock_ops: bool = False
) -> TrialResult:
    case, settings = CASES[found["case"]], row["config"]["settings"]
    expected = row["prediction"]["step_s"]
    trial = Trial(
        number=0,
        workload=str(ROOT / case.model),
        config=row["config"],
        device="cpu",
        ranks=case.ranks,
        budget_bytes=found["budget_bytes"],
        steps=min(max(round(_MEASURE_S / expected), _STEPS[0]), _STEPS[1]),
        clock_ops=clock_ops,
        fingerprint=False,
        env=Choice.from_document(settings).env(),
    )
    executor.submit(trial)
    while True:
        for event in executor.wait(0.05):
            if isinstance(event, TrialResult):
                return event


def _plain(prediction: Prediction) -> dict[str, Any]:
    kept = asdict(prediction) | {"exposed_by_op": (), "critical_path": (), "peak_by_kind": {}}
    return kept | {"interval": list(prediction.interval)}


@dataclass(frozen=True)
class Recorded:
    """The machine of a stored pool; `measure` draws one of a setting's rounds."""

    rounds: dict[str, list[float]]
    draw: random.Random

    def measure(self, scored: Scored) -> float:
        """Return seconds per sample of one of the rounds."""
        return self.draw.choice(self.rounds[scored.key])


class _Exact:
    """A scorer whose predictions are final."""

    rewriter = SimpleNamespace(target=SimpleNamespace(hardware=SimpleNamespace(device="cpu")))

    def refined(self, scored: Scored) -> Scored:
        """Return `scored`, which was simulated op by op."""
        return scored


def replay(stored: dict[str, Any], draws: int) -> dict[str, Any]:
    """Search a stored pool with each searcher; return regrets and the errors of the predictions."""
    rows = {
        each["key"]: each for each in stored["settings"] if each["status"] == "ok" and len(each["step_s"]) > 1
    }
    scored = {key: _scored(each) for key, each in rows.items()}
    per_sample = {
        key: 1 / (each.prediction.samples_per_s * each.prediction.step_s) for key, each in scored.items()
    }
    rounds = {key: [each * per_sample[key] for each in row["step_s"]] for key, row in rows.items()}
    truth = {key: statistics.median(values) for key, values in rounds.items()}
    first = [scored[key] for key in stored["baselines"] if key in scored]
    first.sort(key=lambda each: each.rank_among_levels("throughput"))
    hand = [
        each for each in first if {kind for _, kind in kinds(each.choice)} in ({"full"}, {"full", "fsdp"})
    ]
    cases: Any = SimpleNamespace(
        scores=SimpleNamespace(by_key=scored),
        setup=SimpleNamespace(budget_bytes=stored["budget_bytes"], scorer=_Exact()),
        first=first,
        settings=[scored[key] for key in sorted(scored)],
        by_hand=hand[-1] if hand else None,
        grid=[],
    )
    best = min(truth, key=lambda key: truth[key])
    found: dict[str, dict[int, list[float]]] = {}
    for name in _SEARCHERS:
        for trials in TRIALS:
            for seed in range(draws):
                machine: Any = Recorded(rounds, random.Random(seed))
                ran: Trials = SEARCHERS[name](cases, machine, min(trials, len(scored)), seed)
                if ran:
                    regret = truth[shipped(cases, machine, ran).key] / truth[best] - 1
                    found.setdefault(name, {}).setdefault(trials, []).append(regret)
    errors = {key: scored[key].prediction.step_s * per_sample[key] / truth[key] for key in scored}
    ordered = sorted(truth, key=lambda key: truth[key])
    return {
        "case": stored["case"],
        "settings": len(scored),
        "best": rows[best]["summary"],
        "best_step_s": statistics.median(rows[best]["step_s"]),
        "noise": statistics.median(
            (max(each) - min(each)) / 2 / statistics.median(each) for each in rounds.values()
        ),
        "median_error": statistics.median(abs(each - 1) for each in errors.values()),
        "rank_correlation": _rank_correlation(
            [truth[key] for key in ordered], [errors[key] * truth[key] for key in ordered]
        ),
        "regret": {
            name: {
                trials: {"median": statistics.median(each), "worst": max(each), "draws": len(each)}
                for trials, each in by_trials.items()
            }
            for name, by_trials in found.items()
        },
        "measured_over_predicted": {rows[key]["summary"]: round(1 / errors[key], 3) for key in ordered},
    }


def _rank_correlation(a: list[float], b: list[float]) -> float:
    ranks = [[sorted(each).index(value) for value in each] for each in (a, b)]
    return statistics.correlation(*ranks) if len(a) > 2 else math.nan


def _scored(row: dict[str, Any]) -> Scored:
    kept = row["prediction"]
    prediction = Prediction(
        **{
            **kept,
            "interval": Interval(*kept["interval"]),
            "exposed_by_op": tuple(OpTime(**each) for each in kept["exposed_by_op"]),
            "critical_path": tuple(OpTime(**each) for each in kept["critical_path"]),
        }
    )
    return Scored(Choice.from_document(row["config"]["settings"]), row["key"], prediction)


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of the regrets."""
    lines = [
        "# Regret of the shipped setting, measured on a CPU",
        "",
        "`python benchmarks/search_quality_cpu.py` (its docstring has the rules). Median / worst over the",
        "draws of rounds; ranks and percent of the plain peak are in the case's name. Error and rank",
        "correlation are those of the predictions after the first trial.",
        "",
        "| case | settings | best | step | noise | error | rank corr. | searcher | "
        + " | ".join(f"{trials} trials" for trials in TRIALS)
        + " |",
        "|---" * (8 + len(TRIALS)) + "|",
    ]
    for row in rows:
        for name, by_trials in row["regret"].items():
            cells = [f"{each['median']:.1%} / {each['worst']:.1%}" for each in by_trials.values()]
            lines.append(
                f"| {row['case']} | {row['settings']} | {row['best']} |"
                f" {format_seconds(row['best_step_s'])} | {row['noise']:.1%} |"
                f" {row['median_error']:.0%} | {row['rank_correlation']:.2f} | {name} |"
                f" {' | '.join(cells)} |"
            )
    return "\n".join(lines) + "\n"


def _write(file: Path, found: dict[str, Any]) -> None:
    file.write_text(json.dumps(found) + "\n")


def main() -> None:
    """Measure a case, or replay the stored ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("make", "measure", "replay"))
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.task == "make":
        for name in asked.cases:
            found = make(name)
            (asked.folder / f"{name}.json").write_text(json.dumps(found) + "\n")
            print(f"{name}: {len(found['settings'])} settings", flush=True)
        return
    if asked.task == "measure":
        for name in asked.cases:
            file = asked.folder / f"{name}.json"
            found = json.loads(file.read_text())
            for _ in range(asked.rounds):
                measure(found, partial(_write, file, found))
        return
    files = sorted(asked.folder.glob("*.json"))
    rows = [
        replay(json.loads(file.read_text()), asked.draws)
        for file in files
        if not asked.cases or file.stem in asked.cases
    ]
    text = markdown(rows)
    print(text)
    if asked.json:
        asked.json.write_text(json.dumps({"draws": asked.draws, "cases": rows}, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(text)


if __name__ == "__main__":
    main()
