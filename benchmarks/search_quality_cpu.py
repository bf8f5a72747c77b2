"""Regret of the setting that a search ships after a few trials, on step times measured on this CPU.

    python benchmarks/search_quality_cpu.py make CASE [--folder DIR]
    python benchmarks/search_quality_cpu.py measure CASE [--rounds 3] [--folder DIR]
    python benchmarks/search_quality_cpu.py replay [--draws 20] [--outliers 0] [--searchers memtune]

A case is a workload on one or two ranks. `make` writes `DIR/CASE.json`: for each budget the settings
with the best predictions, the best one of every technique, and the baselines, all within the budget; a
setting that several budgets share stands there once. The first baseline runs with the clocks of a search's
first trial, and the result corrects the predictions.

`measure` runs every setting in a process of its own; later rounds repeat, in alternating order, those that
are within `CONTENDER` of the fastest one of a budget. The machine should be idle; a run that other work
disturbed is repeated. A round in which the time of a reference op moved by more than `_MOVED` is dropped: its
settings ran on machines of different speeds.

`replay` searches the stored pool of each budget: a trial draws one of the rounds of its setting, and a round
of finalists the same one for all of them. Regret is the median of the shipped setting's rounds over that of
the best one's, minus 1. Searchers and shipping rules are those of `search_quality.py`, and `--outliers` too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from search_quality import SEARCHERS, TRIALS, OtherWork, Trials, shipped

from memtune.autotune.predict import Prediction
from memtune.autotune.predict.breakdown import OpTime
from memtune.autotune.predict.prediction import Interval
from memtune.autotune.search.predictions import trial_config
from memtune.autotune.search.preparation import Setup, prepare
from memtune.autotune.search.trials import make_executor
from memtune.autotune.space import Choice, Scored, SearchOptions, kinds, predict_again
from memtune.autotune.space.baseline_settings import baselines
from memtune.executors import Executor, Trial, TrialResult
from memtune.units import format_seconds

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results" / "search-quality-cpu"
_POOL = 16
_MEASURE_S = 1.0
_STEPS = (3, 12)
_BUSY, _TRIES = 0.1, 3
"""Other load from which on a run is repeated, and runs at most."""
_MOVED = 0.1
"""Relative change of the reference op's time within a round from which on the round is dropped."""
_SEARCHERS = ("memtune", "predictions in order", "random", "TPE", "full + fsdp by hand")


class Case(NamedTuple):
    """A workload on this machine."""

    model: str
    ranks: int
    environment: dict[str, str]
    budgets: tuple[float | None, ...] = (0.5, 0.8, None)
    """Fractions of the peak of the plain step; None is no limit."""


def _gpt(**values: int) -> dict[str, str]:
    return {f"MEMTUNE_GPT_{name}": str(value) for name, value in values.items()}


_MODELS = "benchmarks/predict_models"
CONTENDER = 0.15
CASES = {
    f"{name}-{ranks}r": Case(model, ranks, environment)
    for name, model, environment in (
        ("gpt-deep", "examples/gpt.py", _gpt(LAYERS=12, DIM=192, SEQ=64, BATCH=8)),
        ("gpt-wide", "examples/gpt.py", _gpt(LAYERS=3, DIM=512, SEQ=32, BATCH=4)),
        ("gpt-long", "examples/gpt.py", _gpt(LAYERS=4, DIM=128, SEQ=512, BATCH=4)),
        ("vit", f"{_MODELS}/vit.py", {}),
        ("lora", f"{_MODELS}/lora.py", {}),
        ("moe", f"{_MODELS}/moe.py", {}),
        ("bert", f"{_MODELS}/bert.py", {}),
        ("convnext", f"{_MODELS}/convnext.py", {}),
    )
    for ranks in (1, 2)
} | {"demo": Case("examples/gpt.py", 2, {}, (0.928,))}


def make(name: str) -> dict[str, Any]:
    """Return the pools of a case, with predictions before and after the first trial."""
    case = CASES[name]
    os.environ.update(case.environment)
    options = SearchOptions(workload=str(ROOT / case.model), device="cpu", ranks=case.ranks)
    setup = prepare(options)
    plain = baselines(setup.scorer, setup.global_batch)[0][0].scored
    plain_bytes = setup.scorer.refined(plain).prediction.peak_allocated_bytes
    rows: dict[str, dict[str, Any]] = {}
    pools: list[dict[str, Any]] = []
    refined = []
    for fraction in case.budgets:
        budget = None if fraction is None else round(fraction * plain_bytes)
        if budget is not None:
            setup = prepare(replace(options, budget_bytes=budget))
        pool, known = _pool(setup, budget)
        ids = {}
        for key, each in pool.items():
            config = trial_config(setup, each.choice).document()
            # A plan may depend on the budget: the whole document tells settings apart.
            same = rows.setdefault(
                json.dumps(config["settings"], sort_keys=True)
                + json.dumps(config.get("plan"), sort_keys=True),
                {
                    "id": len(rows),
                    "key": key,
                    "config": config,
                    "summary": each.choice.summary,
                    "status": "ok",
                    "step_s": [],
                    "other_load": [],
                    "predicted_before_s": each.prediction.step_s,
                },
            )
            ids[key] = same["id"]
        pools.append(
            {
                "budget": fraction,
                "budget_bytes": budget,
                "ids": sorted(ids.values()),
                "baselines": {ids[key]: name for key, name in known.items()},
            }
        )
        refined.append((setup, pool, ids))
    settings = list(rows.values())
    found: dict[str, Any] = {"case": name, "hardware": setup.hardware.title, "settings": settings}
    first = min((settings[i] for i in pools[-1]["baselines"]), key=lambda each: each["predicted_before_s"])
    executor = make_executor("local", device="cpu", ranks=case.ranks)
    try:
        taught = _run(executor, case, first, clock_ops=True)
    finally:
        executor.close()
    for setup, pool, ids in refined:
        setup.scorer.learn(taught.op_times, taught.rates)
        predict_again(pool, setup.scorer)
        for key, i in ids.items():
            settings[i]["prediction"] = _plain(pool[key].prediction)
    return found | {"pools": pools, "rates": taught.rates, "other_load": taught.other_load}


def _pool(setup: Setup, budget: int | None) -> tuple[dict[str, Scored], dict[str, str]]:
    """Return the settings of one budget by key, and the names of the baselines among them."""
    scores = setup.score(0)
    fits = [each for each in scores.by_key.values() if _fits(each, budget)]
    fits.sort(key=lambda each: each.rank("throughput"))
    best_of_kind = {kind: each for each in reversed(fits) for kind in kinds(each.choice)}
    known = [each for each in baselines(setup.scorer, setup.global_batch)[0] if _fits(each.scored, budget)]
    wanted = [*(each.scored for each in known), *fits[:_POOL], *best_of_kind.values()]
    pool = {each.key: setup.scorer.refined(each) for each in {one.key: one for one in wanted}.values()}
    pool = {key: each for key, each in pool.items() if _fits(each, budget)}
    return pool, {each.scored.key: each.name for each in known if each.scored.key in pool}


def measure(found: dict[str, Any], keep: Callable[[], None]) -> bool:
    """Run one more round; return whether it was kept. `keep` writes the pool after each trial."""
    case = CASES[found["case"]]
    os.environ.update(case.environment)
    executor = make_executor("local", device="cpu", ranks=case.ranks)
    wanted = {i for pool in found["pools"] for i in _contenders(found, pool["ids"])}
    rows = [each for each in found["settings"] if each["id"] in wanted]
    least = min(len(each["step_s"]) for each in rows)
    try:
        for row in rows if least % 2 == 0 else reversed(rows):
            if len(row["step_s"]) > least:
                continue
            result = _undisturbed(executor, case, row)
            row["status"] = result.status
            if result.step_s is None:
                row["reason"] = result.reason
            else:
                row["peak_bytes"] = result.peak_allocated_bytes
                row["step_s"].append(result.step_s)
                row["other_load"].append(round(result.other_load, 3))
                # Rounds of pools that were measured before have none.
                row.setdefault("reference_s", []).append(result.reference_s)
            keep()
    finally:
        executor.close()
    ran = [each for each in rows if len(each["step_s"]) > least]
    references = [each["reference_s"][-1] for each in ran]
    if not references or max(references) <= min(references) * (1 + _MOVED):
        return True
    for row in ran:
        for values in (row["step_s"], row["other_load"], row["reference_s"]):
            values.pop()
    keep()
    return False


def _contenders(found: dict[str, Any], ids: list[int]) -> list[int]:
    """Return what has not run yet, and what is within `CONTENDER` of the fastest of these settings."""
    rows = [each for each in found["settings"] if each["id"] in ids and each["status"] == "ok"]
    if any(not each["step_s"] for each in rows):
        return [each["id"] for each in rows if not each["step_s"]]
    per_sample = {each["id"]: statistics.median(each["step_s"]) / _samples(each) for each in rows}
    limit = min(per_sample.values(), default=0.0) * (1 + CONTENDER)
    return [i for i, value in per_sample.items() if value <= limit]


def _samples(row: dict[str, Any]) -> float:
    """Return the samples of one step."""
    return float(row["prediction"]["samples_per_s"] * row["prediction"]["step_s"])


def _fits(scored: Scored, budget: int | None) -> bool:
    return budget is None or scored.prediction.peak_allocated_bytes <= budget


def _run(executor: Executor, case: Case, row: dict[str, Any], *, clock_ops: bool = False) -> TrialResult:
    settings, expected = row["config"]["settings"], row["predicted_before_s"]
    trial = Trial(
        number=0,
        workload=str(ROOT / case.model),
        config=row["config"],
        device="cpu",
        ranks=case.ranks,
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


def _undisturbed(executor: Executor, case: Case, row: dict[str, Any]) -> TrialResult:
    """Run a setting again while other work used the machine; return the run that it disturbed least."""
    results = [_run(executor, case, row)]
    while results[-1].other_load > _BUSY and len(results) < _TRIES:
        results.append(_run(executor, case, row))
    return min(results, key=lambda each: each.other_load)


def _plain(prediction: Prediction) -> dict[str, Any]:
    kept = asdict(prediction) | {"exposed_by_op": (), "critical_path": (), "peak_by_kind": {}}
    return kept | {"interval": list(prediction.interval)}


@dataclass(frozen=True)
class Recorded:
    """The machine of a stored pool: `measure` draws a round of its setting, `measure_round` one for all."""

    rounds: dict[str, list[float]]
    draw: random.Random
    other_work: OtherWork

    def measure(self, scored: Scored) -> float:
        """Return seconds per sample of one of the rounds."""
        return self.draw.choice(self.rounds[scored.key]) * self.other_work.factor()

    def measure_round(self, finalists: Sequence[Scored]) -> list[float]:
        """Return seconds per sample in the same round, as finalists of a search run one after the other."""
        # A machine that was slow in a round was slow for all of its settings. One that ran in fewer rounds
        # is no contender: its last round serves.
        rounds = [self.rounds[each.key] for each in finalists]
        drawn = self.draw.randrange(max(map(len, rounds), default=1))
        return [each[min(drawn, len(each) - 1)] * self.other_work.factor() for each in rounds]


class _Exact:
    """A scorer whose predictions are final."""

    rewriter = SimpleNamespace(target=SimpleNamespace(hardware=SimpleNamespace(device="cpu")))

    def refined(self, scored: Scored) -> Scored:
        """Return `scored`, which was simulated op by op."""
        return scored


def replay(
    stored: dict[str, Any],
    pool: dict[str, Any],
    draws: int,
    outliers: float = 0.0,
    searchers: Sequence[str] = _SEARCHERS,
) -> dict[str, Any]:
    """Search the stored pool of a budget with each searcher; return regrets and errors of the predictions."""
    budget = pool["budget_bytes"]
    rows = {
        each["key"]: each
        for each in (stored["settings"][i] for i in pool["ids"])
        if each["step_s"] and (budget is None or each["peak_bytes"] <= budget)
    }
    scored = {key: _scored(each) for key, each in rows.items()}
    per_sample = {key: 1 / _samples(each) for key, each in rows.items()}
    rounds = {key: [each * per_sample[key] for each in row["step_s"]] for key, row in rows.items()}
    truth = {key: statistics.median(values) for key, values in rounds.items()}
    known = {stored["settings"][int(i)]["key"] for i in pool["baselines"]}
    first = [scored[key] for key in scored if key in known]
    first.sort(key=lambda each: each.rank_among_levels("throughput"))
    hand = [
        each for each in first if {kind for _, kind in kinds(each.choice)} in ({"full"}, {"full", "fsdp"})
    ]
    cases: Any = SimpleNamespace(
        scores=SimpleNamespace(by_key=scored),
        setup=SimpleNamespace(budget_bytes=budget, scorer=_Exact()),
        first=first,
        settings=[scored[key] for key in sorted(scored)],
        by_hand=hand[-1] if hand else None,
        grid=[],
    )
    best = min(truth, key=lambda key: truth[key])
    found: dict[str, dict[int, list[float]]] = {}
    for name in searchers:
        for trials in TRIALS:
            for seed in range(draws):
                machine: Any = Recorded(rounds, random.Random(seed), OtherWork(outliers, seed))
                ran: Trials = SEARCHERS[name](cases, machine, min(trials, len(scored)), seed)
                if ran:
                    regret = truth[shipped(cases, machine, ran).key] / truth[best] - 1
                    found.setdefault(name, {}).setdefault(trials, []).append(regret)
    errors = {key: scored[key].prediction.step_s * per_sample[key] / truth[key] for key in scored}
    before = {key: row["predicted_before_s"] * per_sample[key] / truth[key] for key, row in rows.items()}
    ordered = sorted(truth, key=lambda key: truth[key])
    repeated = [each for each in rounds.values() if len(each) > 1]
    return {
        "case": stored["case"],
        "budget": pool["budget"],
        "settings": len(scored),
        "best": rows[best]["summary"],
        "best_step_s": statistics.median(rows[best]["step_s"]),
        "noise": statistics.median((max(each) - min(each)) / 2 / statistics.median(each) for each in repeated)
        if repeated
        else None,
        "median_error_before": statistics.median(abs(each - 1) for each in before.values()),
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
        "draws of rounds. Errors of the predictions before and after the first trial; the rank correlation",
        "is of those after it.",
        "",
        "| case | budget | settings | best | step | noise | error | rank corr. | searcher | "
        + " | ".join(f"{trials} trials" for trials in TRIALS)
        + " |",
        "|---" * (9 + len(TRIALS)) + "|",
    ]
    for row in rows:
        noise = "–" if row["noise"] is None else format(row["noise"], ".1%")  # no setting ran twice
        for name, by_trials in row["regret"].items():
            cells = [f"{each['median']:.1%} / {each['worst']:.1%}" for each in by_trials.values()]
            lines.append(
                f"| {row['case']} | {'none' if row['budget'] is None else format(row['budget'], '.0%')} |"
                f" {row['settings']} | {row['best']} | {format_seconds(row['best_step_s'])} |"
                f" {noise} | {row['median_error_before']:.0%}, {row['median_error']:.0%} |"
                f" {row['rank_correlation']:.2f} | {name} | {' | '.join(cells)} |"
            )
    lines += [
        "",
        "| searcher | " + " | ".join(f"{trials} trials" for trials in TRIALS) + " |",
        "|---" * 4 + "|",
    ]
    for name in _SEARCHERS:
        of = [row["regret"][name] for row in rows if name in row["regret"]]
        if not of:
            continue
        cells = [
            f"{statistics.median(each[trials]['median'] for each in of):.1%} /"
            f" {max(each[trials]['worst'] for each in of):.1%}"
            for trials in TRIALS
        ]
        lines.append(f"| {name}, all {len(of)} | {' | '.join(cells)} |")
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
    parser.add_argument("--searchers", choices=_SEARCHERS, nargs="*", default=_SEARCHERS)
    parser.add_argument("--outliers", type=float, default=0.0, help="probability of a slowed measurement")
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
            kept = [measure(found, partial(_write, file, found)) for _ in range(asked.rounds)]
            print(f"{name}: {len(kept) - sum(kept)} of {len(kept)} rounds dropped", flush=True)
        return
    files = sorted(asked.folder.glob("*.json"))
    stored = [json.loads(file.read_text()) for file in files if not asked.cases or file.stem in asked.cases]
    rows = [
        replay(each, pool, asked.draws, asked.outliers, asked.searchers)
        for each in stored
        for pool in each["pools"]
    ]
    text = markdown(rows)
    print(text)
    if asked.json:
        asked.json.write_text(json.dumps({"draws": asked.draws, "cases": rows}, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(text)


if __name__ == "__main__":
    main()
