"""Shared setups of search tests: real recordings of small models, made once, and a machine with known true
rates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from support import zoo_paths
from support.shared_recordings import made_once

from memtune import hardware
from memtune.autotune.search import preparation
from memtune.autotune.search.preparation import Setup
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.space.scoring import Scorer, Scores
from memtune.autotune.space.search_options import SearchOptions, TargetOptions
from memtune.autotune.space.search_space import ENUMERATE_UP_TO
from memtune.executors.base import Trial, TrialResult
from memtune.program.step import Recording
from memtune.technique import Reason, Target
from memtune.testing.drift_check import recording_of
from memtune.workload.workload import Workload

GPT = str(zoo_paths.ZOO["gpt"])
AXES = ("execution", "recompute", "offload.activations")
"""With `offload.states` as well the space has 13 times as many candidates, which are scored no otherwise."""


class Probed:
    """The probe of a `model.py` that is known to be usable: it starts no process."""

    def report(self) -> None:
        """Report nothing."""


_record = preparation.record
_RECORDED: dict[tuple[object, ...], Recording] = {}


def _recorded_once(workload: Workload, **how: Any) -> Recording:
    """Record a model of the zoo once for all searches and plans of it: other axes need no other recording."""
    if workload.path.parent != zoo_paths.ZOO["gpt"].parent:
        return _record(workload, **how)
    table = how["workspace"] and str(how["workspace"].made_for)
    sizes = (tuple(sorted(how[name])) for name in ("sizes", "between"))
    key = (workload.path, how["target"], table, *sizes)
    if key not in _RECORDED:
        _RECORDED[key] = made_once(_file_name("recording", key), lambda: _record(workload, **how))
    return _RECORDED[key]


def _file_name(what: str, key: tuple[object, ...]) -> str:
    return f"{what}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"


preparation.record = _recorded_once


@cache
def recording(name: str = "gpt") -> Recording:
    return recording_of(zoo_paths.ZOO[name])


def rewriter(
    name: str = "gpt", *, ranks: int = 1, budget_bytes: int | None = None, gpu: str = "h100-80g"
) -> Rewriter:
    return Rewriter(recording(name), Target(hardware.find(gpu), ranks, budget_bytes))


@cache
def _prepared(
    workload: str, ranks: int, goal: Any, axes: tuple[str, ...], global_batch: int | None, budget: int | None
) -> Setup:
    asked = TargetOptions(
        workload=workload,
        device="cpu",
        ranks=ranks,
        goal=goal,
        axes=axes,
        global_batch=global_batch,
        budget_bytes=budget,
    )
    return preparation.prepare(asked, begun=Probed())  # type: ignore[arg-type]


@dataclass(frozen=True)
class _ScoredOnce(Setup):
    """A setup whose space is scored once for all searches of the same options: it was half of their time."""

    made_of: tuple[object, ...] = ()
    """Options that its scores depend on."""

    def score(self, seed: int, trials: int | None = None) -> Scores:
        drawn = (seed, trials) if self.space.size > ENUMERATE_UP_TO else ()
        key = (self.scorer.rewriter, *drawn)
        if key not in _SCORES:
            name = _file_name("scores", (*self.made_of, *drawn))
            _SCORES[key] = made_once(name, lambda: Setup.score(self, seed, trials))
        found = _SCORES[key]
        return replace(found, by_key=dict(found.by_key))  # a search refines its own


_SCORES: dict[tuple[object, ...], Scores] = {}


def prepared(options: TargetOptions, **_: object) -> Setup:
    """Return `prepare` of these options, cached per workload; only the budget is inserted afterwards."""
    batch = options.goal == "batch"
    made = _prepared(
        options.workload,
        options.ranks,
        options.goal,
        options.axes,
        options.global_batch,
        options.budget_bytes if batch else None,
    )
    made_of = (
        options.workload,
        options.ranks,
        options.goal,
        options.axes,
        options.global_batch,
        options.budget_bytes,
    )
    values = {each.name: getattr(made, each.name) for each in fields(Setup)}
    values |= {"budget_bytes": options.budget_bytes, "scorer": Scorer(_rewriter(*made_of))}
    return _ScoredOnce(**values, made_of=(*made_of, made.space.size))


@cache
def _rewriter(
    workload: str,
    ranks: int,
    goal: Any,
    axes: tuple[str, ...],
    global_batch: int | None,
    budget_bytes: int | None,
) -> Rewriter:
    """Programs are cached over searches of the same model and budget."""
    made = _prepared(workload, ranks, goal, axes, global_batch, budget_bytes if goal == "batch" else None)
    return Rewriter(made.recording, replace(made.scorer.rewriter.target, budget_bytes=budget_bytes))


def truth(
    options: SearchOptions, *, peak: float = 0.05, step: float = 0.3, noise: float = 0.01
) -> Callable[[Trial], TrialResult]:
    """Return a machine that differs from the simulator by up to `peak` and `step` per setting, and by `noise`
    between runs.
    """
    made = prepared(options)

    def run(trial: Trial) -> TrialResult:
        choice = Choice.from_document(trial.config["settings"])
        scored = made.scorer.score(choice)
        if isinstance(scored, Reason):
            return TrialResult(number=trial.number, status="unfit", reason=str(scored))
        prediction = scored.prediction
        peak_bytes = round(prediction.peak_allocated_bytes * (1 + peak * _unit(choice.summary, "peak")))
        if trial.budget_bytes is not None and peak_bytes > trial.budget_bytes:
            return TrialResult(number=trial.number, status="oom", reason="out of memory", wall_s=1.0)
        step_s = prediction.step_s * (1 + step * _unit(choice.summary, "step"))
        steps = [step_s * (1 + noise * _unit(f"{trial.number} {i}", "noise")) for i in range(trial.steps)]
        middle = sorted(steps)[len(steps) // 2]
        samples = prediction.samples_per_s * prediction.step_s
        return TrialResult(
            number=trial.number,
            status="ok",
            peak_allocated_bytes=peak_bytes,
            peak_reserved_bytes=peak_bytes,
            step_s=middle,
            step_s_all=steps,
            samples_per_s=samples / middle,
            losses=[5.0 - 0.1 * i for i in range(trial.steps + 1)],
            wall_s=1.0,
        )

    return run


def _unit(text: str, salt: str) -> float:
    """Return a number in [-1, 1] that depends only on the text."""
    return int(hashlib.sha256(f"{salt} {text}".encode()).hexdigest()[:8], 16) / 2**31 - 1
