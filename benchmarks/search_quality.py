"""Regret of the setting that a search ships after a few trials, on clusters that are simulated.

    python benchmarks/search_quality.py [CASE ...] [--draws 200] [--outliers 0] [--json FILE]

No GPU is used: each draw is a cluster whose true step times differ from the prediction by hidden factors,
log-uniform from 0.5 to 2, on

- `mechanism`: the seconds that each technique adds to the step of the same setting without it, if it adds
  any;
- `simulated`: the ops of each mechanism (recomputation, optimizer, copies, links, host, SSDs), and the step
  is simulated again, so that what was hidden may become exposed (`RESIMULATED` draws);
- `resource`: the seconds that each resource takes on the critical path;
- `technique`: the whole step, for each technique, the allocator's settings included. Factors of techniques
  that are used together multiply, so the best of hundreds of settings may be 10 times as fast as predicted,
  and no search of 12 trials can find it reliably.

A measurement has 1 % of noise, and the machine drifts by up to 3 % during a search. With `--outliers 0.05`
one of twenty measurements takes 1.5 to 3 times as long: other work ran meanwhile, and nothing shows it.

The pool of a case holds the settings with the best predictions, the best one of every technique and the
peers' settings, all simulated op by op. Regret is the true time of the shipped setting over that of the best
one of the pool, minus 1.

Compared with `memtune search` (its proposals and its posterior): the order of the predictions alone, random
settings of the pool, Optuna's TPE over the pool's slots, a grid of ZeRO stages and micro-batches (largest
first, by stage, as DeepSpeed's autotuner) and full recompute with FSDP, as by hand. The finalists of every
searcher run again in the rounds of `memtune search`, which decide what is shipped.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
from search_cases import CASES, Pool, added_s, pool, simulated_s

from memtune.autotune.predict import Calibration
from memtune.autotune.search.trial_verdict import (
    WORTH_A_ROUND,
    Measured,
    finalists,
    finalists_to_repeat,
    judge,
)
from memtune.autotune.space import Observed, Proposer, Pruner, Scored, StepTimeModel, kinds
from memtune.executors import TrialResult

TRIALS = (3, 6, 12)
NOISE, DRIFT = 0.01, 0.03
SLOWED = (1.5, 3.0)
RESIMULATED = 20
_BASELINE_EVERY = 4
_ROUNDS, _MORE_ROUNDS = 2, 4
_MECHANISMS = (
    "recompute",
    "optimizer",
    "host_to_device",
    "device_to_host",
    "intra_link",
    "inter_link",
    "ssd_read",
    "ssd_write",
    "host_threads",
    "host_issue",
)

Truth = Mapping[str, float]
"""True seconds per sample by the key of a setting."""


def _factors(names: Any, seed: int) -> dict[Any, float]:
    draw = random.Random(seed)
    return {name: math.exp(draw.uniform(-math.log(2), math.log(2))) for name in sorted(names)}


def by_resource(cases: Pool, draws: int) -> Iterator[Truth]:
    """Yield clusters with a factor on each resource's part of the critical path."""
    names = {name for each in cases.settings for name in each.prediction.critical_s}
    for seed in range(draws):
        factors = {**_factors(names, seed), "compute": 1.0}
        yield {
            each.key: sum(factors[name] * s for name, s in each.prediction.critical_s.items())
            / sum(each.prediction.critical_s.values())
            / each.prediction.samples_per_s
            for each in cases.settings
        }


def by_technique(cases: Pool, draws: int) -> Iterator[Truth]:
    """Yield clusters with a factor on the whole step for each technique."""
    names = {kind for each in cases.settings for kind in kinds(each.choice)}
    for seed in range(draws):
        factors = _factors(names, seed)
        yield {
            each.key: math.prod(factors[kind] for kind in kinds(each.choice)) / each.prediction.samples_per_s
            for each in cases.settings
        }


def by_mechanism(cases: Pool, draws: int) -> Iterator[Truth]:
    """Yield clusters with a factor on the seconds that each technique adds."""
    added = {each.key: added_s(cases, each) for each in cases.settings}
    names = {kind for each in cases.settings for kind in kinds(each.choice)}
    for seed in range(draws):
        factors = _factors(names, seed)
        yield {
            each.key: max(
                1 / each.prediction.samples_per_s
                + sum((factors[kind] - 1) * s for kind, s in added[each.key].items()),
                _LEAST / each.prediction.samples_per_s,
            )
            for each in cases.settings
        }


def by_simulation(cases: Pool, draws: int) -> Iterator[Truth]:
    """Yield clusters whose ops take longer by a factor for each mechanism."""
    for seed in range(min(draws, RESIMULATED)):
        yield simulated_s(cases, _factors(_MECHANISMS, seed))


_LEAST = 0.2
"""Fraction of the predicted step that remains at least: seconds of several techniques may add up to more."""
HIDDEN = {
    "mechanism": by_mechanism,
    "simulated": by_simulation,
    "resource": by_resource,
    "technique": by_technique,
}


class OtherWork:
    """Slows a measurement down by a factor of `SLOWED`, with a probability."""

    def __init__(self, probability: float, seed: int) -> None:
        # Its own numbers, so that the noise is the same with and without it.
        self._probability, self._draw = probability, random.Random(f"other work {seed}")

    def factor(self) -> float:
        """Return the factor on the time of one more measurement, mostly 1."""
        slowed, by = self._draw.random() < self._probability, self._draw.uniform(*SLOWED)
        return by if slowed else 1.0


class Cluster:
    """A machine with its true times; `measure` is one trial, slowed down with the probability `outliers`."""

    def __init__(self, truth: Truth, seed: int, outliers: float = 0.0) -> None:
        self.truth, self._draw, self._trial = truth, random.Random(seed), 0
        self._other_work = OtherWork(outliers, seed)
        self._drift = self._draw.uniform(-DRIFT, DRIFT)

    def measure(self, scored: Scored) -> float:
        """Return the measured seconds per sample of one more trial."""
        self._trial += 1
        drift = 1 + self._drift * self._trial / max(TRIALS)
        noise = math.exp(self._draw.gauss(0, NOISE))
        return self.truth[scored.key] * drift * noise * self._other_work.factor()

    def measure_round(self, finalists: Sequence[Scored]) -> list[float]:
        """Return the measured seconds per sample of finalists that run one after the other."""
        return [self.measure(each) for each in finalists]


Trials = list[tuple[Scored, float]]
"""Settings that ran, with the measured seconds per sample."""
Searcher = Callable[[Pool, Cluster, int, int], Trials]
"""Runs a number of trials with a seed."""


def by_memtune(cases: Pool, cluster: Cluster, trials: int, seed: int) -> Trials:
    """Search as `memtune search` does: baselines first, then expected improvement."""
    del seed
    found = [(each, cluster.measure(each)) for each in cases.first[: max(1, trials // _BASELINE_EVERY)]]
    # Without a sampler, whose suggestions lie outside of the pool.
    proposer = Proposer(cases.scores, cases.setup.scorer, None, "throughput", lambda *_: None)
    exact = Calibration(peak_ratios=(1.0,) * 4, step_ratios=(1.0,) * 4)
    pruner = Pruner(cases.setup.budget_bytes, calibration=exact)
    while len(found) < trials:
        best = min((value for _, value in found), default=None)
        tried = {each.key for each, _ in found}
        proposal = proposer.next(pruner, tried, best, _step_times(found))
        if proposal is None:
            break
        found.append((proposal.scored, cluster.measure(proposal.scored)))
    return found


def _step_times(ran: Trials) -> StepTimeModel:
    return StepTimeModel(
        [
            Observed(each, value * each.prediction.samples_per_s * each.prediction.step_s)
            for each, value in ran
        ]
    )


def by_prediction(cases: Pool, cluster: Cluster, trials: int, seed: int) -> Trials:
    """Measure what is predicted to be fastest, in that order."""
    del seed
    ranked = sorted(cases.settings, key=lambda each: each.rank_among_levels("throughput"))
    return [(each, cluster.measure(each)) for each in ranked[:trials]]


def by_chance(cases: Pool, cluster: Cluster, trials: int, seed: int) -> Trials:
    """Measure random settings."""
    drawn = random.Random(seed).sample(cases.settings, trials)
    return [(each, cluster.measure(each)) for each in drawn]


def by_tpe(cases: Pool, cluster: Cluster, trials: int, seed: int) -> Trials:
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
    found: Trials = []
    while len(found) < trials:
        trial = study.ask()
        asked = [trial.suggest_categorical(str(i), values) for i, values in enumerate(named)]
        nearest = max(left, key=lambda key: sum(map(str.__eq__, values_of[key], asked)))
        each = left.pop(nearest)
        found.append((each, cluster.measure(each)))
        study.tell(trial, found[-1][1])
    return found


def by_zero_grid(cases: Pool, cluster: Cluster, trials: int, seed: int) -> Trials:
    """Measure ZeRO stages with the largest micro-batches first, one stage after the other."""
    del seed
    return [(each, cluster.measure(each)) for each in cases.grid[:trials]]


def by_hand(cases: Pool, cluster: Cluster, trials: int, seed: int) -> Trials:
    """Take full recompute, with FSDP on several GPUs."""
    del trials, seed
    chosen = cases.by_hand
    return [] if chosen is None else [(chosen, cluster.measure(chosen))]


SEARCHERS: dict[str, Searcher] = {
    "memtune": by_memtune,
    "predictions in order": by_prediction,
    "random": by_chance,
    "TPE": by_tpe,
    "ZeRO stage × micro-batch": by_zero_grid,
    "full + fsdp by hand": by_hand,
}


def shipped(cases: Pool, cluster: Cluster, ran: Trials) -> Scored:
    """Return the winner of the rounds of `memtune search` among the settings that ran."""
    names = {each.key: f"baseline {i}" for i, each in enumerate(cases.first)}
    scored = {each.choice: each for each, _ in ran}
    of_choice = {
        choice: tuple(_result(each, s) for each, s in ran if each.choice == choice) for choice in scored
    }
    measured = {
        choice: Measured(choice, of_choice[choice], names.get(each.key, ""))
        for choice, each in scored.items()
    }
    model, fastest = _step_times(ran), min(value for _, value in ran)
    mean, sd = model.posterior(list(scored.values()))
    expected = {
        choice: (float(at) - math.log(each.prediction.samples_per_s), float(error))
        for (choice, each), at, error in zip(scored.items(), mean, sd, strict=True)
    }
    gains = model.repeat_gains(fastest)
    doubtful = {choice for choice, each in scored.items() if gains.get(each.key, 0.0) > WORTH_A_ROUND}
    best = finalists(list(measured.values()), "throughput", expected, doubtful)
    rounds: dict[Any, list[TrialResult | None]] = {each.choice: [] for each in best}
    racers = [each.choice for each in best]
    for done in range(1, _ROUNDS + _MORE_ROUNDS + 1):
        running = [choice for choice in rounds if choice in racers and len(racers) > 1]
        values = dict(
            zip(running, cluster.measure_round([scored[choice] for choice in running]), strict=True)
        )
        for choice, results in rounds.items():
            results.append(_result(scored[choice], values[choice]) if choice in values else None)
        best = [
            replace(
                measured[each.choice],
                results=(
                    *measured[each.choice].results,
                    *(result for result in rounds[each.choice] if result is not None),
                ),
                rounds=tuple(rounds[each.choice]),
            )
            for each in best
        ]
        if done >= _ROUNDS:
            left = finalists_to_repeat(
                [each for each in best if each.choice in racers],
                "throughput",
                _ROUNDS + _MORE_ROUNDS - done,
            )
            racers = [each.choice for each in left]
        if len(racers) < 2:
            break
    verdict = judge(best, "throughput")
    assert verdict is not None
    return scored[verdict.winner.choice]


def _result(scored: Scored, value: float) -> TrialResult:
    return TrialResult.model_construct(
        number=0,
        status="ok",
        step_s=value,
        step_s_all=[value],
        samples_per_s=1 / value,
        peak_allocated_bytes=scored.prediction.peak_allocated_bytes,
    )


def regrets(cases: Pool, draws: int, mode: str, outliers: float = 0.0) -> list[dict[str, Any]]:
    """Return rows: hidden factors, searcher, trials, and median, 90th percentile and largest regret."""
    rows = []
    truths = list(HIDDEN[mode](cases, draws))
    for name, searcher in SEARCHERS.items():
        for trials in TRIALS:
            found, used, started = [], [], time.process_time()
            for seed, truth in enumerate(truths):
                cluster = Cluster(truth, seed, outliers)
                ran = searcher(cases, cluster, trials, seed)
                if ran:
                    found.append(truth[shipped(cases, cluster, ran).key] / min(truth.values()) - 1)
                    used.append(len(ran))
            if found:
                rows.append(
                    {
                        "hidden": mode,
                        "searcher": name,
                        "trials": trials,
                        "outliers": outliers,
                        "draws": len(found),
                        "median": statistics.median(found),
                        "p90": sorted(found)[int(0.9 * (len(found) - 1))],
                        "worst": max(found),
                        "mean_trials_used": statistics.mean(used),
                        "cpu_s_per_search": (time.process_time() - started) / len(found),
                    }
                )
                print(f"  {mode:10s} {name:24s} {_text(rows[-1])}", flush=True)
    return rows


def _text(row: dict[str, Any]) -> str:
    return (
        f"{row['trials']:3d} trials ({row['mean_trials_used']:4.1f} used)  regret median {row['median']:6.1%}"
        f"  p90 {row['p90']:6.1%}  worst {row['worst']:6.1%}"
    )


def markdown(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a table of the regrets for each kind of hidden factors."""
    lines = [
        "# Regret of the shipped setting, simulated",
        "",
        "`python benchmarks/search_quality.py` (its docstring has the rules): true step times are simulated,",
        "with hidden factors of 0.5 to 2; no GPU was used. Median / 90th percentile / worst over the draws.",
    ]
    for mode in HIDDEN:
        found = [(case, row) for case, rows in results.items() for row in rows if row["hidden"] == mode]
        if not found:
            continue
        draws = sorted({row["draws"] for _, row in found})
        lines += [
            "",
            f"## Factors by {mode}, {' or '.join(map(str, draws))} draws",
            "",
            f"| workload | searcher | {' | '.join(f'{trials} trials' for trials in TRIALS)} |",
            "|---" * (2 + len(TRIALS)) + "|",
        ]
        cells: dict[tuple[str, str], list[str]] = {}
        for case, row in found:
            cells.setdefault((case, row["searcher"]), []).append(
                f"{row['median']:.1%} / {row['p90']:.1%} / {row['worst']:.1%}"
            )
        lines += [f"| {case} | {name} | {' | '.join(texts)} |" for (case, name), texts in cells.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the cases that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--outliers", type=float, default=0.0, help="probability of a slowed measurement")
    parser.add_argument("--hidden", choices=HIDDEN, nargs="*", default=list(HIDDEN))
    parser.add_argument("--json", type=Path, help="results; those of what does not run again are kept")
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    results = json.loads(asked.json.read_text())["regrets"] if asked.json and asked.json.exists() else {}
    for name in asked.cases:
        started = time.process_time()
        made = pool(CASES[name])
        seconds = time.process_time() - started
        print(f"{name}: {len(made.settings)} settings, made in {seconds:.0f} CPU s", flush=True)
        for mode in asked.hidden:
            kept = [row for row in results.get(name, []) if row["hidden"] != mode]
            results[name] = kept + regrets(made, asked.draws, mode, asked.outliers)
            if asked.json:
                ordered = {case: results[case] for case in CASES if case in results}
                asked.json.write_text(json.dumps({"regrets": ordered}, indent=1) + "\n")
                if asked.markdown:
                    asked.markdown.write_text(markdown(ordered))


if __name__ == "__main__":
    main()
