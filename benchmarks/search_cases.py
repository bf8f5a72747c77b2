"""Workloads × clusters of `search_quality.py`, and the pool of settings of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from memtune.autotune.predict import simulation
from memtune.autotune.predict.breakdown import RESOURCES
from memtune.autotune.search.preparation import Setup, prepare
from memtune.autotune.space import (
    Choice,
    PlanOptions,
    Pruner,
    Scored,
    Scorer,
    Scores,
    kinds,
)
from memtune.autotune.space.baseline_settings import baselines
from memtune.hardware import Hardware, op_costs
from memtune.program import Phase, Resource, Step
from memtune.search_spaces import find
from memtune.technique import Reason

ROOT = Path(__file__).parents[1]
_POOL = 300
_GPT, _OTHER = "examples/gpt.py", "benchmarks/search_models/transformer.py"


class Case(NamedTuple):
    """A workload on a cluster."""

    model: str
    gpus: int
    gpu_type: str
    environment: dict[str, str]


def _gpt(size: str, **more: str) -> dict[str, str]:
    return {"MEMTUNE_GPT_SIZE": size, **{f"MEMTUNE_GPT_{name}": value for name, value in more.items()}}


def _other(name: str, **more: str) -> dict[str, str]:
    return {
        "MEMTUNE_BENCH_MODEL": name,
        **{f"MEMTUNE_BENCH_{name}": value for name, value in more.items()},
    }


CASES = {
    "gpt-7b, 8 × H100": Case(_GPT, 8, "h100-80g", _gpt("7b")),
    "gpt-7b, 8 × A100 40 GB": Case(_GPT, 8, "a100-40g", _gpt("7b")),
    "gpt-7b, 64 × H100": Case(_GPT, 64, "h100-80g", _gpt("7b")),
    "gpt-1.3b, one 4090": Case(_GPT, 1, "rtx-4090", _gpt("1.3b")),
    "gpt-1.3b of 16k tokens, 8 × H100": Case(_GPT, 8, "h100-80g", _gpt("1.3b", SEQ="16384", BATCH="8")),
    "lora-13b, 8 × A100 40 GB": Case(_OTHER, 8, "a100-40g", _other("lora-13b")),
    "vit-h, one 4090": Case(_OTHER, 1, "rtx-4090", _other("vit-h", BATCH="64")),
    "vit-h, 8 × A100 40 GB": Case(_OTHER, 8, "a100-40g", _other("vit-h")),
    "moe-8x1b, 8 × H100": Case(_OTHER, 8, "h100-80g", _other("moe-8x1b")),
}


@dataclass
class Pool:
    """The settings of a case, all simulated op by op.

    Attributes:
        first: The baselines that fit, the fastest first.
        by_hand: Full recompute with FSDP and the largest micro-batch that fits.
        grid: ZeRO stage × micro-batch with full recompute or none, as DeepSpeed's autotuner tries.
    """

    setup: Setup
    scores: Scores
    first: list[Scored]
    by_hand: Scored | None
    grid: list[Scored]

    @property
    def settings(self) -> list[Scored]:
        """Return the settings in a fixed order."""
        return [self.scores.by_key[key] for key in sorted(self.scores.by_key)]


def pool(case: Case) -> Pool:
    """Record, score and refine settings of a case that fit: the best, and the best of every technique."""
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
    scorer, pruner = setup.scorer, Pruner(setup.budget_bytes)
    fits = [each for each in scores.by_key.values() if _fits(each, pruner)]
    fits.sort(key=lambda each: each.rank_among_levels("throughput"))
    best_of_kind = {kind: each for each in reversed(fits) for kind in kinds(each.choice)}
    known, _ = baselines(scorer, setup.global_batch)
    hand = _widest(scorer, pruner, setup, "full", "fsdp" if case.gpus > 1 else None)
    grid = list(_zero_grid(scorer, setup, case.gpus))
    wanted = [*fits[:_POOL], *best_of_kind.values(), *(each.scored for each in known), *grid]
    refined = {each.key: scorer.refined(each) for each in {each.key: each for each in wanted}.values()}
    refined = {key: each for key, each in refined.items() if _fits(each, pruner)}
    if hand is not None:
        refined[hand.key] = hand
    first = [refined[each.scored.key] for each in known if each.scored.key in refined]
    first.sort(key=lambda each: each.rank_among_levels("throughput"))
    return Pool(
        setup,
        replace(scores, by_key=refined),
        first,
        hand,
        [refined[each.key] for each in grid if each.key in refined],
    )


def _fits(scored: Scored, pruner: Pruner) -> bool:
    return pruner.budget_bytes is None or scored.prediction.peak_allocated_bytes <= pruner.budget_bytes


def _choices(setup: Setup, recompute: str | None, sharding: str | None) -> Iterator[Choice]:
    """Yield the techniques with default knobs for every micro-batch, the largest first."""
    chosen = {"recompute": recompute, "sharding.states": sharding}
    techniques = {slot: find(slot, kind)(kind=kind) for slot, kind in chosen.items() if kind is not None}
    for execution in setup.space.executions:
        yield Choice.of(execution, techniques)


def _widest(
    scorer: Scorer, pruner: Pruner, setup: Setup, recompute: str, sharding: str | None
) -> Scored | None:
    scored = (scorer.score(choice, level="events") for choice in _choices(setup, recompute, sharding))
    return next((each for each in scored if isinstance(each, Scored) and _fits(each, pruner)), None)


def _zero_grid(scorer: Scorer, setup: Setup, gpus: int) -> Iterator[Scored]:
    for stage in ("ddp", "zero1", "zero2", "zero3") if gpus > 1 else (None,):
        for recompute in (None, "full"):
            for choice in _choices(setup, recompute, stage):
                scored = scorer.score(choice)
                if isinstance(scored, Scored):
                    yield scored


def added_s(cases: Pool, scored: Scored) -> dict[tuple[str, str], float]:
    """Return by technique the seconds that it adds to a step per sample, in simulation: against the same
    setting without it, 0 if it saves time or the setting cannot be without it.
    """
    scorer, choice = cases.setup.scorer, scored.choice
    alone = {"sharding.states": find("sharding.states", "ddp")(kind="ddp")}
    with_it = _s_per_sample(scored)
    found: dict[tuple[str, str], float] = {}
    for slot, technique in choice.chosen.items():
        others = {other: each for other, each in choice.chosen.items() if other != slot}
        if slot == "sharding.states" and scorer.rewriter.target.ranks > 1:
            others = alone | others
        without = scorer.score(Choice.of(choice.execution, others), level="events")
        saved = 0.0 if isinstance(without, Reason) else with_it - _s_per_sample(without)
        found[slot, technique.kind] = max(saved, 0.0)
    return found


def simulated_s(cases: Pool, factors: Mapping[str, float]) -> dict[str, float]:
    """Return seconds per sample by key, simulated again with the ops of each mechanism slower by a factor.

    Args:
        cases: The pool.
        factors: By mechanism, as in `Prediction.mechanism_s`.
    """

    def slower(step: Step, hardware: Hardware, *, ranks: int = 1) -> Any:
        costs = op_costs(step, hardware, ranks=ranks)
        by_resource = np.array([factors.get(name, 1.0) for name in RESOURCES])
        factor = by_resource[step.ops.resource]
        computes = step.ops.resource == Resource.COMPUTE
        for name, phase in (("recompute", Phase.RECOMPUTE), ("optimizer", Phase.OPTIMIZER)):
            factor[computes & (step.ops.phase == phase)] = factors.get(name, 1.0)
        return costs._replace(op_s=costs.op_s * factor, issue_s=costs.issue_s * by_resource[-1])

    # No rate of `Hardware` is of one mechanism alone, so the ops' costs are replaced where they are used.
    with mock.patch.object(simulation, "op_costs", slower):
        again = {each.key: cases.setup.scorer.again(each) for each in cases.settings}
    return {key: _s_per_sample(each) for key, each in again.items()}


def _s_per_sample(scored: Scored) -> float:
    return 1 / scored.prediction.samples_per_s
