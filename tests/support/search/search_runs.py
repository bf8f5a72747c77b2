"""Searches of a small model with a simulated executor, in the current folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.search.prepared_search import AXES, GPT, truth
from support.search.simulated_executor import SimulatedExecutor

from memtune.autotune.search import study
from memtune.autotune.search.control import Control
from memtune.autotune.search.outcome import SearchOutcome
from memtune.autotune.search.search_events import read_events
from memtune.autotune.space.search_options import SearchOptions
from memtune.executors.base import Trial, TrialResult

BUDGET = 6 * 2**20  # the plain model needs 8.1 MiB, full recompute 4.9


def asked(**changes: Any) -> SearchOptions:
    base = SearchOptions(
        workload=GPT,
        device="cpu",
        axes=AXES,
        budget_bytes=BUDGET,
        trials=8,
        repeats=1,
        study="s",
        out=Path("tuned.yaml"),
    )
    return replace(base, **changes)


def run(
    options: SearchOptions,
    predict: Callable[[Trial], TrialResult] | None = None,
    control: Control | None = None,
    slots: int = 1,
) -> SearchOutcome:
    return study.search(options, control, executor=SimulatedExecutor(predict or truth(options), slots=slots))


def log() -> list[Any]:
    return list(read_events(".memtune/s/events.jsonl"))


def of(kind: type[Any]) -> list[Any]:
    return [each for each in log() if isinstance(each, kind)]
