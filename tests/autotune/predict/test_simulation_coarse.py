"""The coarse level is a lower bound of the events level, with any overlap with compute, so the best candidate
is never lost.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.search.prepared_search import recording

from memtune import hardware
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space import scoring
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.autotune.space.scoring import Scored, Scorer, score_all
from memtune.autotune.space.search_space import Space
from memtune.hardware.spec import Hardware
from memtune.program.step import Program
from memtune.search_spaces import all_techniques, find
from memtune.search_spaces.execution import Execution
from memtune.ssd import offload_dir
from memtune.technique import Reason, Target, Technique

SMALL = {
    "copy_out": {"min_bytes": 0},
    "lohan": {"min_bytes": 1, "bucket_mib": 0.005},
    "stronghold": {"window": 2},
}
"""Knobs at which a technique does something to a model this small."""


@pytest.fixture(autouse=True)
def drive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))


def made(technique: type[Technique]) -> Technique:
    kind = technique.model_fields["kind"].default
    mine = {
        name: value for name, value in SMALL.get(kind, {}).items() if name in technique.model_fields
    }  # of two slots' kinds
    return technique(kind=kind, **mine)


def programs(machine: Hardware, ranks: int, accumulate: int) -> dict[str, Program]:
    """The program of the small GPT under each fitting technique, on several ranks with sharded states, by the
    technique's name.
    """
    rewriter = Rewriter(recording(), Target(machine, ranks))
    chosen = {"sharding.states": made(find("sharding.states", "fsdp"))} if ranks > 1 else {}
    found = {}
    for technique in map(made, all_techniques()):
        choice = Choice.of(
            Execution(micro_batch=2, accumulate=accumulate), chosen | {technique.slot: technique}
        )
        program = rewriter.program(choice)
        if not isinstance(program, Reason):
            found[f"{technique.slot}: {technique.kind}"] = program
    return found


# Times of ops such that compute, copies, links and the drive are all about as long: where nothing hides all
# of another.
GPU = replace(
    hardware.find("a100-40g"),
    launch_s=1e-7,
    memory_bytes_per_s=2e10,
    inter_link_latency_s=1e-7,
    intra_link_latency_s=1e-7,
)


@pytest.mark.parametrize(
    ("machine", "ranks", "accumulate"), [(GPU, 1, 1), (GPU, 4, 6), (hardware.detect("cpu"), 2, 3)]
)
def test_coarse_time_bounds_events_time_of_all_techniques(
    machine: Hardware, ranks: int, accumulate: int
) -> None:
    found = {
        name: simulate(program, machine).step_s / simulate(program, machine, level="events").step_s
        for name, program in programs(machine, ranks, accumulate).items()
    }
    assert len(found) > 20
    assert {name: ratio for name, ratio in found.items() if not 0.8 < ratio <= 1 + 1e-9} == {}
    assert sorted(found.values())[len(found) // 2] > 0.98


@pytest.mark.parametrize("share", [0.9, 0.6, 0.45, 0.3])
def test_best_by_events_is_among_few_best_by_coarse(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brute force over a small space, with budgets at which offload has to be paid for."""
    kinds = ("none", "optimizer_cpu", "lohan", "stronghold", "zero_offload")
    states = tuple(made(find("offload.states", kind)) for kind in kinds)
    recompute = tuple(made(find("recompute", kind)) for kind in ("none", "full"))
    executions = (
        Execution(micro_batch=4),
        Execution(micro_batch=2, accumulate=2),
        Execution(micro_batch=1, accumulate=4),
    )
    space = Space(executions, {"recompute": recompute, "offload.states": states}, {})
    free = Scorer(Rewriter(recording(), Target(GPU)))
    events = [each for choice in space if isinstance(each := free.score(choice, level="events"), Scored)]
    budget = int(share * max(each.prediction.peak_allocated_bytes for each in events))
    best = min(
        (each for each in events if each.prediction.peak_allocated_bytes <= budget),
        key=lambda each: each.rank("throughput"),
    )
    monkeypatch.setattr(scoring, "EVENTS_FOR", 1)
    scored = score_all(
        space, Scorer(Rewriter(recording(), Target(GPU, budget_bytes=budget))), "throughput"
    ).by_key.values()
    fitting = [
        each
        for each in scored
        if each.prediction.level == "events" and each.prediction.peak_allocated_bytes <= budget
    ]
    found = min(fitting, key=lambda each: each.rank("throughput"))
    assert found.prediction.step_s == pytest.approx(best.prediction.step_s)
    assert sum(each.prediction.level == "events" for each in scored) < len(events) / 2
