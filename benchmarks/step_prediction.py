"""Predicted against measured step times: before any trial of a model, and after two.

    python benchmarks/step_prediction.py list --json FILE [--models gpt,vit]
    python benchmarks/step_prediction.py measure --json FILE [--minutes 4]
    python benchmarks/step_prediction.py report --json FILE [--markdown FILE]

`list` writes the trials: models of `predict_models` on this CPU in a dozen settings and more, with one rank
and with two. `measure` runs them as a search does, in two rounds: all once, then all again. It stops after
`--minutes`; the next call continues. Each trial reports how much of the machine others used; trials on a
disturbed machine are run again.

`report` predicts from the file's rates, so predictions can be repeated for other versions without new trials.
`before`: the machine's rates, no trial of any model. `after two`: the plain setting and full recompute were
measured, as every search does, with the op times and rates of the first; their own rows are left out. An
error is |predicted / measured - 1|.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scipy.stats import spearmanr

from memtune.autotune.search.predictions import trial_config
from memtune.autotune.search.preparation import Setup, prepare
from memtune.autotune.space import Choice, Observed, Scored, StepTimeModel, TargetOptions
from memtune.executors import LocalExecutor, Trial, TrialResult
from memtune.hardware import BUSY, OpTime, cpu_probe, usable_cores
from memtune.technique import Reason

MODELS = Path(__file__).parent / "predict_models"
NAMES = ("gpt", "llama", "bert", "vit", "resnet", "moe")
SAMPLES = 8
STEPS, WARMUP, ROUNDS = 5, 2, 2
_TRIES = 3
_STATES: dict[int, dict[str, Any]] = {1: {}, 2: {"states": {"kind": "ddp"}}}
_MECHANISMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"recompute": {"kind": "full"}},
    "selective": {"recompute": {"kind": "selective"}},
    "every_nth": {"recompute": {"kind": "every_nth", "n": 2}},
    "balanced": {"recompute": {"kind": "balanced"}},
    "attention_output": {"recompute": {"kind": "attention_output"}},
    "copy_out half": {"offload": {"activations": {"kind": "copy_out", "ratio": 0.5}}},
    "copy_out": {"offload": {"activations": {"kind": "copy_out", "ratio": 1.0}}},
    "optimizer_cpu": {"offload": {"states": {"kind": "optimizer_cpu", "update": "native"}}},
    "zero_offload": {"offload": {"states": {"kind": "zero_offload"}}},
    "stronghold": {"offload": {"states": {"kind": "stronghold"}}},
    "l2l": {"offload": {"states": {"kind": "l2l"}}},
    "full + optimizer_cpu": {
        "recompute": {"kind": "full"},
        "offload": {"states": {"kind": "optimizer_cpu", "update": "native"}},
    },
    "half batch": {"execution": {"accumulate": 2}},
    "full, half batch": {"recompute": {"kind": "full"}, "execution": {"accumulate": 2}},
}
_SHARDED: dict[str, dict[str, Any]] = {
    "zero1": {"sharding": {"states": {"kind": "zero1"}}},
    "zero2": {"sharding": {"states": {"kind": "zero2"}}},
    "fsdp": {"sharding": {"states": {"kind": "fsdp"}}},
    "fsdp kept": {"sharding": {"states": {"kind": "fsdp", "reshard_after_forward": False}}},
    "full + fsdp": {"recompute": {"kind": "full"}, "sharding": {"states": {"kind": "fsdp"}}},
    "fsdp + optimizer_cpu": {
        "sharding": {"states": {"kind": "fsdp"}},
        "offload": {"states": {"kind": "optimizer_cpu", "update": "native"}},
    },
}
TAUGHT = ("plain", "full")


def settings(ranks: int) -> dict[str, Choice]:
    """Return the settings by name."""
    found = {}
    for name, document in (_MECHANISMS | (_SHARDED if ranks > 1 else {})).items():
        accumulate = document.get("execution", {}).get("accumulate", 1)
        execution = {"micro_batch": SAMPLES // ranks // accumulate, "accumulate": accumulate}
        sharding = document.get("sharding", _STATES[ranks])
        found[name] = Choice.from_document({**document, "sharding": sharding, "execution": execution})
    return found


def prepared(model: str, ranks: int) -> Setup:
    """Return the setup of a search of `model`."""
    return prepare(
        TargetOptions(workload=str(MODELS / f"{model}.py"), device="cpu", ranks=ranks, global_batch=SAMPLES)
    )


def scored(setup: Setup, choices: dict[str, Choice]) -> dict[str, Scored]:
    """Return the settings that fit, simulated op by op."""
    found = {name: setup.scorer.score(choice) for name, choice in choices.items()}
    return {name: setup.scorer.refined(each) for name, each in found.items() if not isinstance(each, Reason)}


# -- measuring -----------------------------------------------------------------------------------------------


def listed(file: Path, models: list[str]) -> None:
    """Write the trials of each case to `file`, with configs and plans, so that measuring only runs trials."""
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"schema": 1, "cases": {}}
    for case, model, ranks in [(f"{model}-{ranks}", model, ranks) for model in models for ranks in (1, 2)]:
        if case in known["cases"]:
            continue
        setup = prepared(model, ranks)
        known["cases"][case] = {
            name: {
                "config": trial_config(setup, each.choice).document(),
                "env": each.choice.env(),
                "step_s": [],
            }
            for name, each in scored(setup, settings(ranks)).items()
        }
        print(f"{case}: {len(known['cases'][case])} settings", flush=True)
        file.write_text(json.dumps(known, indent=1) + "\n")


def measure(file: Path, minutes: float) -> None:
    """Run missing trials of `file` until `minutes` are over: all cases once, then all again."""
    until_s = time.monotonic() + 60 * minutes
    known = json.loads(file.read_text())
    known.setdefault("rates", asdict(cpu_probe.cpu()))
    missing = [
        (case, name, row)
        for turn in range(ROUNDS)
        for case, rows in known["cases"].items()
        for name, row in rows.items()
        if len(row["step_s"]) <= turn and not row.get("reason")
    ]
    done = 0
    with tempfile.TemporaryDirectory() as logs:
        executor = LocalExecutor(log_dir=logs)
        try:
            for case, name, row in missing:
                if time.monotonic() > until_s:
                    break
                _measure(case, name, row, executor)
                done += 1
        finally:
            executor.close()
            file.write_text(json.dumps(known, indent=1) + "\n")
    print(f"{done} trials, {len(missing) - done} left")


def _measure(case: str, name: str, row: dict[str, Any], executor: LocalExecutor) -> None:
    """Run a setting; again if others used the machine meanwhile."""
    model, _, ranks = case.rpartition("-")
    trial = Trial(
        number=0,
        workload=str(MODELS / f"{model}.py"),
        config=row["config"],
        ranks=int(ranks),
        warmup_steps=WARMUP,
        steps=STEPS,
        global_batch=SAMPLES,
        clock_ops=name == "plain" and not row["step_s"],
        fingerprint=False,
        alone=True,
        env=row["env"],
    )
    tries: list[TrialResult] = []
    while len(tries) < _TRIES and (not tries or tries[-1].other_load >= BUSY):
        executor.submit(trial)
        tries.append(next(_results(executor)))
    result = min(tries, key=lambda each: each.other_load)
    if result.status != "ok":
        row["reason"] = f"{result.status}: {result.reason}"
        return
    row["step_s"].append([round(step_s, 6) for step_s in result.step_s_all])
    row.setdefault("other_load", []).append(round(result.other_load, 3))
    row.setdefault("reference_s", []).append(result.reference_s)
    if result.op_times:
        row["op_times"] = [op.model_dump() for op in result.op_times]
        row["rates"] = result.rates


def _results(executor: LocalExecutor) -> Iterator[TrialResult]:
    while True:
        for event in executor.wait(1.0):
            if isinstance(event, TrialResult):
                yield event


# -- predicting ----------------------------------------------------------------------------------------------


def rows_of(known: dict[str, Any]) -> list[dict[str, Any]]:
    """Return measured and predicted step times of every setting of every case."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MEMTUNE_CACHE"] = cache
        cpu_probe.save(replace(cpu_probe.CpuRates(**known["rates"]), is_given=True))
        cpu_probe.cpu.cache_clear()
        for case, measured in known["cases"].items():
            complete = {name: row for name, row in measured.items() if row["step_s"]}
            if all(name in complete for name in TAUGHT):
                model, _, ranks = case.rpartition("-")
                rows += _predicted(case, prepared(model, int(ranks)), int(ranks), complete)
    return rows


def _predicted(case: str, setup: Setup, ranks: int, measured: dict[str, Any]) -> list[dict[str, Any]]:
    choices = {name: choice for name, choice in settings(ranks).items() if name in measured}
    before = scored(setup, choices)
    real_s = {
        name: statistics.median(s for turn in measured[name]["step_s"] for s in turn) for name in before
    }
    plain = measured["plain"]
    setup.scorer.learn([OpTime(**op) for op in plain.get("op_times", [])], plain.get("rates"))
    again = {name: setup.scorer.again(each) for name, each in before.items()}
    model = StepTimeModel([Observed(again[name], real_s[name]) for name in TAUGHT])
    return [
        {
            "case": case,
            "setting": name,
            "measured_s": real_s[name],
            "between_rounds": _between_rounds(measured[name]["step_s"]),
            "before_s": before[name].prediction.step_s,
            "rates_s": again[name].prediction.step_s,
            "after_s": model.step_s(again[name])[0],
        }
        for name in before
    ]


def _between_rounds(rounds: list[list[float]]) -> float:
    """Return the relative difference of the medians of the two rounds: what no prediction can beat."""
    medians = [statistics.median(each) for each in rounds]
    return max(medians) / min(medians) - 1


def error(row: dict[str, Any], which: str) -> float:
    """Return the relative error of a prediction."""
    return abs(float(row[which]) / float(row["measured_s"]) - 1)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return median errors and rank correlation by case."""
    found = []
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        unseen = [row for row in mine if row["setting"] not in TAUGHT]
        ranks = {
            which: float(
                spearmanr([r[f"{which}_s"] for r in mine], [r["measured_s"] for r in mine]).statistic
            )
            for which in ("before", "after")
        }
        found.append(
            {
                "case": case,
                "settings": len(mine),
                "step_ms": 1e3 * min(row["measured_s"] for row in mine),
                "between_rounds": statistics.median(row["between_rounds"] for row in mine),
                "before": statistics.median(error(row, "before_s") for row in mine),
                "after": statistics.median(error(row, "after_s") for row in unseen),
                "rank_before": ranks["before"],
                "rank_after": ranks["after"],
            }
        )
    return found


def by_setting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return predicted over measured by setting, as geometric means over the cases."""
    found = []
    for name in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == name]
        ratios = {
            which: math.exp(statistics.mean(math.log(row[f"{which}_s"] / row["measured_s"]) for row in mine))
            for which in ("before", "rates", "after")
        }
        found.append({"setting": name, "cases": len(mine), **ratios})
    return found


def markdown(known: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the result as text."""
    cases = summary(rows)
    unseen = [row for row in rows if row["setting"] not in TAUGHT]
    out = [
        "# Predicted against measured step times",
        "",
        f"`benchmarks/step_prediction.py` on {known['rates']['title']}, {usable_cores()} cores.",
        f"Median error {statistics.median(error(row, 'before_s') for row in rows):.1%} before any trial,",
        f"{statistics.median(error(row, 'after_s') for row in unseen):.1%} after two.",
        "",
        "| case | settings | fastest, ms | rounds differ | before | after two | rank before | after two |",
        "|---" * 8 + "|",
    ]
    for each in cases:
        numbers = [f"{each[name]:.1%}" for name in ("between_rounds", "before", "after")]
        numbers += [f"{each[name]:.2f}" for name in ("rank_before", "rank_after")]
        row = [each["case"], str(each["settings"]), f"{each['step_ms']:.0f}", *numbers]
        out.append("| " + " | ".join(row) + " |")
    out += ["", "| setting | cases | before | with op times and rates | after two |", "|---|---|---|---|---|"]
    out += [
        f"| {each['setting']} | {each['cases']} | {each['before']:.2f} | {each['rates']:.2f} |"
        f" {each['after']:.2f} |"
        for each in by_setting(rows)
    ]
    return "\n".join([*out, "", "The second table has geometric means of predicted over measured.", ""])


def main() -> None:
    """Measure, or predict and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=("list", "measure", "report"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--models", default=",".join(NAMES))
    asked = parser.parse_args()
    if asked.do == "list":
        return listed(asked.json, asked.models.split(","))
    if asked.do == "measure":
        return measure(asked.json, asked.minutes)
    known = json.loads(asked.json.read_text())
    rows = rows_of(known)
    known["rows"], known["summary"], known["by_setting"] = rows, summary(rows), by_setting(rows)
    asked.json.write_text(json.dumps(known, indent=1) + "\n")
    print(text := markdown(known, rows))
    if asked.markdown:
        asked.markdown.write_text(text)


if __name__ == "__main__":
    main()
