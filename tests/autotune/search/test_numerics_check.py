"""The numerics part of a certificate: its reference and its tolerance."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.search.prepared_search import GPT, prepared
from support.search.search_runs import BUDGET, asked

from memtune.autotune.search.numerics_check import Difference, _references, difference_between, verdict
from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.pruning import Pruner
from memtune.executors.base import Trial, TrialResult
from memtune.executors.gradient_digest import GradientSums, Region
from memtune.executors.gradient_record import GradientRecord
from memtune.executors.local import LocalExecutor
from memtune.search_spaces.execution import Execution


def trial_with_gradients(*values: float, losses: tuple[float, ...] = (1.0, 0.5)) -> TrialResult:
    """Return a trial that reports one gradient per step."""

    def step(value: float) -> dict[str, GradientRecord]:
        sums = GradientSums()
        sums.add(torch.full((1, 4), value), Region((0, 0), (1, 4), (1, 4)))
        return {"weight": sums.record((1, 4))}

    return TrialResult(
        number=0, status="ok", losses=list(losses), gradients=[step(value) for value in values]
    )


def test_between_names_worst_step_and_parameter() -> None:
    found = difference_between(trial_with_gradients(1.0, 2.2), trial_with_gradients(1.0, 2.0))
    assert found.at == "weight, step 2"
    assert found.gradient == pytest.approx(0.1, rel=1e-5)
    assert found.loss == 0.0
    assert difference_between(
        trial_with_gradients(1.0, losses=(1.0, 0.6)), trial_with_gradients(1.0)
    ).loss == pytest.approx(0.2)


def test_between_refuses_different_numbers_of_steps() -> None:
    with pytest.raises(ValueError, match="the trials report gradients"):
        difference_between(trial_with_gradients(1.0), trial_with_gradients(1.0, 2.0))
    with pytest.raises(ValueError, match="the trials report gradients"):
        difference_between(trial_with_gradients(), trial_with_gradients())


@pytest.mark.parametrize(
    ("winner", "itself", "allowed", "agrees", "tolerance"),
    [
        (0.0, 0.0, 0.0, True, 0.0),
        (1e-9, 0.0, 0.0, False, 0.0),
        (1e-9, 1e-8, 0.0, True, 4e-8),
        (1.5e-8, 1e-8, 0.0, True, 4e-8),
        (5e-8, 1e-8, 0.0, False, 4e-8),
        (1e-5, 0.0, 2e-4, True, 2e-4),
        (1e-3, 0.0, 2e-4, False, 2e-4),
        (1e-3, 4e-5, 2e-4, False, 2e-4),
        (1e-3, 2e-3, 2e-4, True, 8e-3),
    ],
)
def test_verdict_tolerance_is_at_least_reference_noise(
    winner: float, itself: float, allowed: float, agrees: bool, tolerance: float
) -> None:
    said = verdict(Difference(winner), Difference(itself), allowed)
    assert said["agrees"] is agrees
    assert said["tolerance"] == tolerance
    assert said["reference_against_itself"] == (itself or "equal to the bit")
    assert ("4 times what the reference differs from itself" in said["tolerance_is"]) == (
        4 * itself > allowed
    )


@pytest.mark.parametrize("itself", [0.25, float("inf")])
def test_verdict_is_none_if_reference_is_noise(itself: float) -> None:
    said = verdict(Difference(0.3), Difference(itself), 2e-4)
    assert said["agrees"] is None
    assert said["tolerance"] == "none: the reference differs too much from itself"


def test_verdict_of_lossy_techniques_is_none() -> None:
    said = verdict(Difference(0.1), Difference(), None)
    assert said["agrees"] is None
    assert said["difference"] == 0.1


@pytest.mark.slow
def test_numerics_check_compares_gradients_of_real_trials() -> None:
    """A GPT with dropout, whole and in halves: equal but for the order of sums, once nothing is dropped."""

    def trial(number: int, execution: dict[str, int], *, dropout: bool) -> Trial:
        return Trial(
            number=number,
            workload=GPT,
            config={"settings": {"execution": execution}},
            warmup_steps=0,
            steps=2,
            fingerprint=False,
            gradient_steps=2,
            deterministic=True,
            dropout=dropout,
        )

    trials = [
        trial(0, {"micro_batch": 4}, dropout=False),
        trial(1, {"micro_batch": 2, "accumulate": 2}, dropout=False),
        trial(2, {"micro_batch": 4}, dropout=True),
    ]
    executor, results = LocalExecutor(), {}
    try:
        for each in trials:
            executor.submit(each)
            while each.number not in results:
                results |= {
                    found.number: found for found in executor.wait(1.0) if isinstance(found, TrialResult)
                }
    finally:
        executor.close()
    whole, halves, dropped = (results[number] for number in range(3))
    assert all(each.status == "ok" for each in results.values()), results
    assert 0 < difference_between(halves, whole).largest < 2.0**-12
    assert difference_between(dropped, whole).largest > 0.05


@pytest.mark.slow
def test_numerics_reference_over_budget_runs_without_budget() -> None:
    """The plain GPT needs 8.1 MiB, in single samples with full recompute 3.4."""

    def references(
        budget_bytes: int, memory_bytes: int = 2**33, micro_batch: int = 2
    ) -> list[tuple[str, bool]]:
        setup = prepared(asked(budget_bytes=budget_bytes))
        setup = replace(setup, hardware=replace(setup.hardware, memory_bytes=memory_bytes))
        driver: Any = SimpleNamespace(setup=setup, pruner=Pruner(budget_bytes))
        winner = Choice.of(Execution(micro_batch=micro_batch, accumulate=8 // micro_batch), {})
        return [(choice.summary, budgeted) for choice, budgeted in _references(driver, winner)]

    fits, nothing_fits = references(BUDGET), references(2**20)
    assert fits[0][1]
    assert not nothing_fits[0][1]
    assert nothing_fits[0][0] == "mb 2×4"
    # Of another split, gradients of a loss that is not quite a mean over samples would differ.
    assert references(BUDGET, micro_batch=8)[0] == ("mb 8", False)
    assert {name for name, _ in fits} == {name for name, _ in nothing_fits}
    assert references(2**20, memory_bytes=2**20) == []
