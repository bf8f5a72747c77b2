"""The numerics certificate: compare loss and every gradient of the first steps with those of a reference.

Rules:

1. The reference is the plain model at the largest micro-batch that fits, else full recompute (FSDP2's, where
  ranks need it), over the same samples as the winner's step. If none fits the budget, the first one that
  surely fits the machine's memory runs without a budget. So does the plain model at the winner's micro-batch
  rather than at a smaller one: gradients of a loss that is not quite a mean over samples depend on the split.
2. It runs twice, under torch's deterministic algorithms. If the two runs are not bitwise equal, the tolerance
  is at least `_NOISE_MARGIN` times their difference: a correct winner differs from one run as much as the
  other run does. If that is as large as the gradients, there is no verdict. Trials of the study that ran the
  reference twice with bitwise equal results, without those algorithms, serve as well.
3. Otherwise, bitwise techniques on the reference's own micro-batches must be bitwise equal; with a technique
  that reorders sums, half of the digits of the dtype may differ, as in `judge`.
4. Runs that split their batch differently draw other numbers for dropout, so both run without dropout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memtune.autotune.search.driver import Driver
from memtune.autotune.search.predictions import trial_config
from memtune.autotune.search.preparation import Setup
from memtune.autotune.space import Choice, executions, first_that_fits
from memtune.device import platform_of
from memtune.executors import Trial, TrialResult, largest_difference
from memtune.search_spaces.execution import Execution
from memtune.technique import Exactness, Reason

STEPS = 2
"""The first step at the initial weights, the second at weights updated by its gradients."""
_NUMBER = 1_000_000
"""Trials of the certificate do not belong to the study: their numbers lie above this one."""
_FURTHER_TRIES = 2
"""References to try after the first one, predicted to fit, did not."""
_SURELY_FREE = 0.5
"""Share of a machine's memory that a reference without a budget may be predicted to need."""
_NOISE_MARGIN = 4.0
"""Factor on the difference of one pair of runs. 21 pairs of seven runs of a GPT with noisy gradients were up
to 1.5 apart, and with the batch split differently up to 4.
"""


@dataclass(frozen=True)
class Difference:
    """Relative difference between two runs of the same steps."""

    gradient: float = 0.0
    loss: float = 0.0
    at: str = ""
    """The parameter whose gradient differs most, and the step."""

    @property
    def largest(self) -> float:
        """Return the larger of the two."""
        return max(self.gradient, self.loss)

    def display(self) -> str | float:
        """Return the larger difference for a report; bitwise equality as text."""
        return "equal to the bit" if self.largest == 0 else float(f"{self.largest:.2g}")


def difference_between(own: TrialResult, theirs: TrialResult) -> Difference:
    """Compare the gradients and losses that two trials report for the same steps.

    Raises:
        ValueError: Their parameters or numbers of steps differ, or there are none.
    """
    if not own.gradients or len(own.gradients) != len(theirs.gradients):
        raise ValueError(
            f"the trials report gradients of {len(own.gradients)} and {len(theirs.gradients)} steps"
        )
    steps = [
        largest_difference(one, other) for one, other in zip(own.gradients, theirs.gradients, strict=True)
    ]
    (gradient, name), number = max((found, step) for step, found in enumerate(steps, start=1))
    losses = [
        abs(one - other) / max(abs(other), 1e-8) if one != other else 0.0
        for one, other in zip(own.losses, theirs.losses, strict=False)
    ]
    loss = max((math.inf if math.isnan(each) else each for each in losses), default=0.0)
    return Difference(gradient, loss, f"{name}, step {number}" if name else "")


def verdict(winner: Difference, itself: Difference, allowed: float | None) -> dict[str, Any]:
    """Return the numerics part of a certificate from the differences to, and within, the reference.

    Args:
        winner: Difference between the tuned setting and the reference.
        itself: Difference between two runs of the reference.
        allowed: Tolerance by rule 3; None if a lossy technique leaves nothing to compare with.
    """
    found: dict[str, Any] = {"reference_against_itself": itself.display(), "difference": winner.display()}
    if winner.at:
        found["largest_at"] = winner.at
    if allowed is None:
        return {"agrees": None, **found, "tolerance": "none: a lossy technique is in use"}
    noise = _NOISE_MARGIN * itself.largest
    if noise >= 1:  # as large as the gradients are: a wrong winner would agree too
        return {"agrees": None, **found, "tolerance": "none: the reference differs too much from itself"}
    tolerance = max(allowed, noise)
    if noise > allowed:
        why = f"{_NOISE_MARGIN:g} times what the reference differs from itself"
    else:
        why = "half of the digits: sums in another order" if allowed else "bitwise techniques"
    return {
        "agrees": winner.largest <= tolerance,
        **found,
        "tolerance": float(f"{tolerance:.2g}"),
        "tolerance_is": why,
    }


def numerics(driver: Driver, choice: Choice) -> dict[str, Any]:
    """Return the part of a certificate that compares `choice` with the reference: up to three trials."""
    # A failure of these trials is reported in the certificate, never raised: the search has its winner.
    runs = _ShortTrials(driver)
    for tried, (reference, budgeted) in enumerate(_references(driver, choice)):
        dropout = reference.execution == choice.execution
        repeats = _repeats_to_the_bit(driver, reference)
        if repeats and reference == choice:
            return {
                "reference": _display_name(reference),
                "trials": repeats,
                **verdict(Difference(), Difference(), 0.0),
            }
        first = runs.run(reference, dropout=dropout, budgeted=budgeted)
        if first is None or (first.status == "oom" and tried < _FURTHER_TRIES):
            continue
        if first.status != "ok":
            return {"not_run": f"the reference: {first.status}, {first.reason}"}
        second = first if repeats else runs.run(reference, dropout=dropout, budgeted=budgeted)
        own = second if reference == choice else runs.run(choice, dropout=dropout)
        if second is None or own is None or second.status != "ok" or own.status != "ok":
            failed = next((each for each in (second, own) if each is not None and each.status != "ok"), None)
            return {"not_run": f"{failed.status}, {failed.reason}" if failed else "stopped"}
        return {
            "reference": _display_name(reference)
            + ("" if budgeted else ", which does not fit, without the budget"),
            "steps": STEPS,
            "dropout": dropout,
            **_compared(driver, choice, reference, own, first, second),
        }
    return {"not_run": "stopped" if driver.control.stopping else "no reference fits"}


def _repeats_to_the_bit(driver: Driver, reference: Choice) -> int:
    """Return how many trials gave `reference` equal first gradients and losses, 0 for fewer than two."""
    results = [
        each.result
        for each in driver.finished
        if each.job.scored.choice == reference and each.result.status == "ok" and each.result.gradients_sha256
    ]
    shortest = min((len(each.losses) for each in results), default=0)
    digests = {(each.gradients_sha256, tuple(each.losses[:shortest])) for each in results}
    return len(results) if len(results) > 1 and len(digests) == 1 and shortest > 1 else 0


def _display_name(choice: Choice) -> str:
    return choice.summary if choice.techniques else f"plain · {choice.summary}"


def _compared(
    driver: Driver,
    choice: Choice,
    reference: Choice,
    own: TrialResult,
    first: TrialResult,
    second: TrialResult,
) -> dict[str, Any]:
    try:
        return verdict(
            difference_between(own, first),
            difference_between(second, first),
            _allowed(choice, reference, driver.unit),
        )
    except ValueError as error:
        return {"agrees": None, "not_compared": str(error)}


def _allowed(choice: Choice, reference: Choice, unit: float) -> float | None:
    """Return the tolerance of rule 3; `unit` is one rounding of the dtype."""
    classes = {each.exactly() for each in (*choice.techniques, *reference.techniques)}
    if Exactness.LOSSY in classes:
        return None
    return (
        math.sqrt(unit) if Exactness.REORDERED in classes or choice.execution != reference.execution else 0.0
    )


def _references(driver: Driver, chosen: Choice) -> Iterator[tuple[Choice, bool]]:
    """Yield references by rule 1, the best first: those predicted to fit, then those without the budget.

    With whether each has the budget.
    """
    setup, beyond = driver.setup, list[Choice]()
    has_bytes = setup.hardware.usable_bytes(setup.ranks) * _SURELY_FREE
    here = setup.hardware.local_ranks(setup.ranks) if setup.device == "cpu" else 1
    winner = chosen.execution
    by_size = sorted(_same_samples(setup, winner), key=lambda each: -(each.micro_batch or 0))
    sharded = [{"sharding.states": "ddp"}, {"sharding.states": "fsdp"}] if setup.ranks > 1 else [{}]
    for recompute in ({}, {"recompute": "full"}):
        for base in sharded:
            for execution in by_size:
                scored = first_that_fits(setup.scorer, execution, base | recompute)
                if isinstance(scored, Reason):
                    continue
                if driver.pruner.reason(scored.prediction) is None:
                    yield scored.choice, True
                elif scored.prediction.peak_reserved_bytes * here > has_bytes:
                    continue
                elif execution == winner and not recompute:
                    yield scored.choice, False
                else:
                    beyond.append(scored.choice)
    yield from ((choice, False) for choice in beyond)


def _same_samples(setup: Setup, winner: Execution) -> set[Execution]:
    """Return the executions with the winner's samples, even if the search itself does not split batches."""
    samples = (winner.micro_batch or 1) * winner.accumulate
    found = {each for each in setup.space.executions if (each.micro_batch or 1) * each.accumulate == samples}
    found.add(winner.of_size(winner.micro_batch, winner.accumulate))
    return (
        found.union(executions(samples, 1, winner))
        if setup.batch_adds_up and samples * setup.ranks == setup.global_batch
        else found
    )


class _ShortTrials:
    """Short trials outside of the study."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._number = driver, _NUMBER

    def run(self, choice: Choice, *, dropout: bool, budgeted: bool = True) -> TrialResult | None:
        """Run the first steps of `choice`, with or without the budget.

        Return None if the search is stopped meanwhile.
        """
        driver = self._driver
        setup = driver.setup
        self._number += 1
        samples = (choice.execution.micro_batch or 1) * choice.execution.accumulate * setup.ranks
        trial = Trial(
            number=self._number,
            workload=driver.options.workload,
            config=trial_config(setup, choice).document(),
            device=setup.device,
            ranks=setup.ranks,
            budget_bytes=setup.budget_bytes if budgeted else None,
            warmup_steps=0,
            steps=STEPS,
            seed=driver.options.seed,
            global_batch=samples,
            deadline_s=driver.options.trial_deadline_s,
            fingerprint=False,
            gradient_steps=STEPS,
            deterministic=True,
            dropout=dropout,
            env={**choice.env(), **platform_of(setup.device).deterministic_environment},
        )
        return driver.run_outside_study(trial)
