"""Plans by budget for ranks with parts of a model: the budget is that of each rank, and the measured peak
keeps it.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
from support.gloo import run_ranks
from support.ranks import model_parallel_runs
from support.ranks.model_parallel_runs import MODELS, Reason, rewriter

from memtune import hardware
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Candidate, Choice
from memtune.memory import cpu_allocator
from memtune.units import format_bytes

PATH = MODELS / "momentum.py"
RANKS = 4
PLANNED = {
    "planned": ("recompute", {"kind": "planned"}),
    "tsplit": ("offload", {"kind": "tsplit", "min_bytes": 256, "parts": 1}),
}


def settings(kind: str, states: str, how: str, **knobs: Any) -> dict[str, Any]:
    """Return settings with 16 samples at once, so that activations dominate; `knobs` None: nothing is
    planned.
    """
    found = {
        "execution": {"micro_batch": 16, "accumulate": 2},
        "sharding": {"parallel": {"kind": kind, "degree": 2}, "states": {"kind": states}},
    }
    slot, technique = PLANNED[how]
    if knobs:
        planned = {**technique, **knobs}
        found[slot] = planned if slot == "recompute" else {"activations": planned}
    return found


def predicted(kind: str, states: str, how: str, **knobs: Any) -> tuple[Candidate, int]:
    found = rewriter(PATH, RANKS).candidate(Choice.from_document(settings(kind, states, how, **knobs)))
    assert isinstance(found, Candidate), found
    return found, simulate(found.program, hardware.detect("cpu")).peak_allocated_bytes


def on_rank(configs: list[dict[str, Any]]) -> list[int]:
    model_parallel_runs.SEPARATE = PATH  # the model that `peak` builds
    found = []
    for each in configs:
        gc.collect()
        found.append(model_parallel_runs.peak(each))
    return found


Case = tuple[str, str, str]


def check(cases: list[Case]) -> None:
    """Check that prediction and ranks meet a budget half way from the smallest peak to the plain one."""
    configs, budgets, peaks = [], [], []
    for kind, states, how in cases:
        least, plain = predicted(kind, states, how, share=0.0)[1], predicted(kind, states, how)[1]
        assert least < 0.95 * plain, (kind, states, how)
        budget = (least + plain) // 2
        made, peak = predicted(kind, states, how, budget_bytes=budget)
        assert peak <= budget * 0.99, (kind, states, how)  # the rest is for what no recording shows
        plans = {slot: plan.document() for slot, plan in made.plans.items()}
        configs.append({"settings": settings(kind, states, how, budget_bytes=budget), "plan": plans})
        budgets.append(budget)
        peaks.append(peak)
    if cpu_allocator.available() is not None:
        pytest.skip(f"no native ledger: {cpu_allocator.available()}")
    found = run_ranks(on_rank, RANKS, configs, deadline_s=280)
    for number, (case, budget, peak) in enumerate(zip(cases, budgets, peaks, strict=True)):
        measured = max(each[number] for each in found)  # contexts are not all alike
        assert measured <= budget, case
        assert measured == pytest.approx(peak, rel=0.02), case


def test_measured_peak_keeps_the_budget() -> None:
    check([("tensor", "zero3", "planned")])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "sequence_parallel", "head_context"])
@pytest.mark.parametrize("how", list(PLANNED))
def test_measured_peak_keeps_the_budget_under_every_division(kind: str, how: str) -> None:
    check([(kind, states, how) for states in ("ddp", "zero1", "zero2", "zero3")])


def test_unreachable_budget_is_refused_with_the_peak_of_a_part() -> None:
    """The reported smallest peak is that of a rank with its part, not of one with the full model."""
    asked = Choice.from_document(settings("tensor", "zero3", "planned", budget_bytes=1000))
    reason = rewriter(PATH, RANKS).candidate(asked)
    assert isinstance(reason, Reason)
    _, least = predicted("tensor", "zero3", "planned", share=0.0)
    assert f"the smallest needs {format_bytes(least)}" in str(reason)
