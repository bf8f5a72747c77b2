"""Regret of the setting that a search ships after a few trials, on clusters that are simulated.

    python benchmarks/search_quality.py [CASE ...] [--draws 200] [--json FILE] [--markdown FILE]

No GPU is used: each draw is a cluster whose true step times differ from the prediction by hidden factors,
log-uniform from 0.5 to 2. `resource`: each resource that compute waits for has a factor on its seconds.
`technique`: each technique, the allocator's settings included, has a factor on the whole step; factors of
techniques that are used together multiply, so the best of hundreds of settings may be 10 times as fast as
predicted, and no search of 12 trials can find it reliably. A measurement has 1 % of noise, and the machine
drifts by up to 3 % during a search.

The pool of a case holds the settings with the best predictions and the best one of every technique, all
simulated op by op; regret is the true time of the shipped setting over that of the
best one of the pool, minus 1.

Compared with `memtune search` (its proposals and its posterior): the order of the predictions alone, random
settings of the pool, Optuna's TPE over the pool's slots, and full recompute with FSDP, as by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import optuna

from memtune.autotune.predict import Calibration
from memtune.autotune.search.baselines import baselines
from memtune.autotune.search.preparation import Setup, prepare
from memtune.autotune.space import (
    PRIOR_SCALE,
    Observed,
    PlanOptions,
    Proposer,
    Pruner,
    Scored,
    Scores,
    StepTimeModel,
    kinds,
)

ROOT = Path(__file__).parents[1]
TRIALS = (3, 6, 12)
NOISE, DRIFT = 0.01, 0.03
_POOL = 300
_BASELINE_EVERY = 4


class Case(NamedTuple):
    """A workload on a cluster."""

    model: str
    gpus: int
    gpu_type: str
    environment: dict[str, str]


CASES = {
    "gpt-7b, 8 × H100": Case("examples/gpt.py", 8, "h100-80g", {"MEMTUNE_GPT_SIZE": "7b"}),
    "gpt-7b, 8 × A100 40 GB": Case("examples/gpt.py", 8, "a100-40g", {"MEMTUNE_GPT_SIZE": "7b"}),
    "gpt-1.3b, one 4090": Case("examples/gpt.py", 1, "rtx-4090", {"MEMTUNE_GPT_SIZE": "1.3b"}),
    "gpt-1.3b 16k tokens, 8 × H100": Case(
        "examples/gpt.py",
        8,
        "h100-80g",
        {"MEMTUNE_GPT_SIZE": "1.3b", "MEMTUNE_GPT_SEQ": "16384", "MEMTUNE_GPT_BATCH": "8"},
    ),
}


@dataclass
class Pool:
    """The settings of a case, all simulated op by op, and what runs first."""

    setup: Setup
    scores: Scores
    first: list[Scored]
    by_hand: Scored | None

    @property
    def settings(self) -> list[Scored]:
        """Return the settings in a fixed order."""
        return [self.scores.by_key[key] for key in sorted(self.scores.by_key)]


def pool(case: Case) -> Pool:
    """Record, score and refine the settings of a case that fit."""
    os.environ.update(case.environment)
    try:
        options = PlanOptions(
            workload=str(ROOT / case.model), device="cuda", ranks=case.gpus, gpu_type=case.gpu_type
        )
        setup = prepare(options, for_trials=False)
        scores = setup.score(0)
    finally:
        for name in case.environment:
            del os.environ[name]
    pruner = Pruner(setup.budget_bytes)
    fits = [each for each in scores.by_key.values() if _fits(each, pruner)]
    fits.sort(key=lambda each: each.rank_among_levels("throughput"))
    best_of_kind = {kind: each for each in reversed(fits) for kind in kinds(each.choice)}
    known, refused = baselines(setup.scorer, setup.global_batch)
    del refused
    wanted = {each.key: each for each in (*fits[:_POOL], *best_of_kind.values())}
    by_name = {each.name: each.scored for each in known if _fits(each.scored, pruner)}
    wanted |= {each.key: each for each in by_name.values()}
    refined = {key: setup.scorer.refined(each) for key, each in wanted.items()}
    refined = {key: each for key, each in refined.items() if _fits(each, pruner)}
    first = sorted(
        (refined[each.key] for each in by_name.values() if each.key in refined),
        key=lambda each: each.rank_among_levels("throughput"),
    )
    hand = by_name.get("full recompute")
    for each in refined.values():
        if {kind for _, kind in kinds(each.choice)} == {"full", "fsdp"} and not _has_knobs(each):
            hand = each
    return Pool(setup, replace(scores, by_key=refined), first, hand and refined.get(hand.key, hand))


def _has_knobs(scored: Scored) -> bool:
    return scored.choice.complexity[1] > 0


def _fits(scored: Scored, pruner: Pruner) -> bool:
    return pruner.budget_bytes is None or scored.prediction.peak_allocated_bytes <= pruner.budget_bytes


class Cluster:
    """A machine with hidden factors; `measure` is one trial, `true_s` seconds per sample without noise."""

    def __init__(self, settings: list[Scored], seed: int, *, by_technique: bool) -> None:
        self._draw = random.Random(seed)
        self._trial = 0
        self._drift = self._draw.uniform(-DRIFT, DRIFT)
        names = sorted({kind for each in settings for kind in kinds(each.choice)})
        resources = sorted({name for each in settings for name in each.prediction.critical_s})
        self._of_kind = {name: self._factor() if by_technique else 1.0 for name in names}
        self._of_resource = {
            name: 1.0 if by_technique or name == "compute" else self._factor() for name in resources
        }

    def _factor(self) -> float:
        return math.exp(self._draw.uniform(-math.log(2), math.log(2)))

    def true_s(self, scored: Scored) -> float:
        """Return seconds per sample."""
        parts = scored.prediction.critical_s
        whole = sum(parts.values())
        slower = sum(self._of_resource[name] * seconds for name, seconds in parts.items()) / whole
        factor = math.prod(self._of_kind[kind] for kind in kinds(scored.choice))
        return slower * factor / scored.prediction.samples_per_s

    def measure(self, scored: Scored) -> float:
        """Return the measured seconds per sample of one more trial."""
        self._trial += 1
        drift = 1 + self._drift * self._trial / max(TRIALS)
        return self.true_s(scored) * drift * math.exp(self._draw.gauss(0, NOISE))


Searcher = Callable[[Pool, Cluster, int, int], list[tuple[Scored, float]]]
"""Runs a number of trials with a seed; returns settings with measured seconds per sample."""


def by_memtune(cases: Pool, cluster: Cluster, trials: int, seed: int) -> list[tuple[Scored, float]]:
    """Search as `memtune search` does: baselines first, then expected improvement."""
    del seed
    found = [(each, cluster.measure(each)) for each in cases.first[: max(1, trials // _BASELINE_EVERY)]]
    # Without a sampler, whose suggestions lie outside of the pool.
    proposer = Proposer(cases.scores, cases.setup.scorer, None, "throughput", lambda *_: None)
    exact = Calibration(peak_ratios=(1.0,) * 4, step_ratios=(1.0,) * 4)
    pruner = Pruner(cases.setup.budget_bytes, calibration=exact)
    while len(found) < trials:
        observed = [
            Observed(each, value * each.prediction.samples_per_s * each.prediction.step_s, NOISE)
            for each, value in found
        ]
        best = min((value for _, value in found), default=None)
        tried = {each.key for each, _ in found}
        proposal = proposer.next(pruner, tried, best, StepTimeModel(observed, PRIOR_SCALE["cuda"]))
        if proposal is None:
            break
        found.append((proposal.scored, cluster.measure(proposal.scored)))
    return found


def by_prediction(cases: Pool, cluster: Cluster, trials: int, seed: int) -> list[tuple[Scored, float]]:
    """Measure what is predicted to be fastest, in that order."""
    del seed
    ranked = sorted(cases.settings, key=lambda each: each.rank_among_levels("throughput"))
    return [(each, cluster.measure(each)) for each in ranked[:trials]]


def by_chance(cases: Pool, cluster: Cluster, trials: int, seed: int) -> list[tuple[Scored, float]]:
    """Measure random settings."""
    drawn = random.Random(seed).sample(cases.settings, trials)
    return [(each, cluster.measure(each)) for each in drawn]


def by_tpe(cases: Pool, cluster: Cluster, trials: int, seed: int) -> list[tuple[Scored, float]]:
    """Measure what Optuna's TPE suggests slot by slot: the untried setting that agrees in most slots."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=3))
    slots = sorted({slot for each in cases.settings for slot, _ in kinds(each.choice)})
    values_of = {
        each.key: (str(each.choice.execution), *(str(each.choice.technique(slot)) for slot in slots))
        for each in cases.settings
    }
    named = [sorted(set(column)) for column in zip(*values_of.values(), strict=True)]
    left = {each.key: each for each in cases.settings}
    found: list[tuple[Scored, float]] = []
    while len(found) < trials:
        trial = study.ask()
        asked = [trial.suggest_categorical(str(i), values) for i, values in enumerate(named)]
        nearest = max(left, key=lambda key: sum(map(str.__eq__, values_of[key], asked)))
        each = left.pop(nearest)
        found.append((each, cluster.measure(each)))
        study.tell(trial, found[-1][1])
    return found


def by_hand(cases: Pool, cluster: Cluster, trials: int, seed: int) -> list[tuple[Scored, float]]:
    """Take full recompute, with FSDP on several GPUs."""
    del trials, seed
    chosen = cases.by_hand
    return [] if chosen is None else [(chosen, cluster.measure(chosen))]


SEARCHERS: dict[str, Searcher] = {
    "memtune": by_memtune,
    "predictions in order": by_prediction,
    "random": by_chance,
    "TPE": by_tpe,
    "full + fsdp by hand": by_hand,
}


def regrets(cases: Pool, draws: int) -> list[dict[str, Any]]:
    """Return rows: hidden factors, searcher, trials, and median, 90th percentile and largest regret."""
    rows = []
    for by_technique in (False, True):
        for name, searcher in SEARCHERS.items():
            for trials in TRIALS:
                found, used, started = [], [], time.process_time()
                for seed in range(draws):
                    cluster = Cluster(cases.settings, seed, by_technique=by_technique)
                    ran = searcher(cases, cluster, trials, seed)
                    if not ran:
                        continue
                    shipped = min(ran, key=lambda each: each[1])[0]
                    best = min(map(cluster.true_s, cases.settings))
                    found.append(cluster.true_s(shipped) / best - 1)
                    used.append(len(ran))
                if found:
                    rows.append(
                        {
                            "hidden": "technique" if by_technique else "resource",
                            "searcher": name,
                            "trials": trials,
                            "draws": len(found),
                            "median": statistics.median(found),
                            "p90": sorted(found)[int(0.9 * (len(found) - 1))],
                            "worst": max(found),
                            "mean_trials_used": statistics.mean(used),
                            "cpu_s_per_search": (time.process_time() - started) / len(found),
                        }
                    )
                    print(f"  {rows[-1]['hidden']:9s} {name:22s} {_text(rows[-1])}", flush=True)
    return rows


def _text(row: dict[str, Any]) -> str:
    return (
        f"{row['trials']:3d} trials ({row['mean_trials_used']:.1f} used)  regret median {row['median']:6.1%}"
        f"  p90 {row['p90']:6.1%}  worst {row['worst']:6.1%}"
    )


def markdown(results: dict[str, list[dict[str, Any]]], draws: int) -> str:
    """Return the table of the regrets."""
    lines = [
        "# Regret of the shipped setting, simulated",
        "",
        "`python benchmarks/search_quality.py`: step times are simulated, with hidden factors of 0.5 to 2 by",
        f"technique or resource; {draws} draws each; no GPU was used.",
        "",
        "| workload | hidden factors by | searcher | trials | median | 90th percentile | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, rows in results.items():
        lines += [
            f"| {case} | {row['hidden']} | {row['searcher']} | {row['trials']} | {row['median']:.1%} |"
            f" {row['p90']:.1%} | {row['worst']:.1%} |"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    results = {}
    for name in asked.cases:
        started = time.process_time()
        made = pool(CASES[name])
        seconds = time.process_time() - started
        print(f"{name}: {len(made.settings)} settings, made in {seconds:.0f} CPU s", flush=True)
        results[name] = regrets(made, asked.draws)
    if asked.json:
        asked.json.write_text(json.dumps({"draws": asked.draws, "regrets": results}, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(markdown(results, asked.draws))


if __name__ == "__main__":
    main()
