"""The numerics certificate: loss and every gradient of the first steps under the tuned setting against a reference.

Rules:
1. The reference is the plain model at the largest micro-batch that fits, else full recompute (FSDP2's, where ranks need it), over
   the same samples as the winner's step. Where none fits the budget, the first for which the machine surely has the memory runs
   without one.
2. It runs twice, under torch's deterministic algorithms. Where the two are not equal to the bit, the least tolerance is
   `_NOISE_MARGIN` times what lies between them: a right winner is as far from one of them as the other one is, so without it
   half of them would be called wrong. Where that is as large as the gradients are, nothing is judged. Trials of the study that
   ran it twice and agree to the bit, without those algorithms, serve as well.
3. Without that: bitwise techniques on the reference's own micro-batches must be equal to the bit; with anything that adds in
   another order, half of the digits of the dtype may differ, as in `judge`.
4. Runs that cut their batch differently draw other numbers for dropout, so both run without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memtune.autotune.candidates import Choice
from memtune.autotune.driver import Driver, trial_config
from memtune.autotune.guards import first_that_fits
from memtune.autotune.scoring import Scored
from memtune.autotune.setup import Setup
from memtune.autotune.space import executions
from memtune.executors.base import Trial, TrialResult
from memtune.executors.evidence import largest_difference
from memtune.search_spaces.execution import Execution
from memtune.technique import Exactness, Reason

STEPS = 2
"""The first at the weights that the model starts with, the second at those that its own gradients have made."""
_NUMBER = 1_000_000
"""Trials of the certificate are not the study's: they have numbers beyond it."""
_FURTHER_TRIES = 2
"""References that are tried after one that was predicted to fit does not."""
_SURELY_FREE = 0.5
"""Share of a machine's memory that a reference without a budget may be predicted to need."""
_NOISE_MARGIN = 4.0
"""Times the difference of one pair of runs. 21 pairs of seven runs of a GPT with noise in its gradients were up to 1.5 apart, and
with the batch cut otherwise up to 4."""
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True)
class Difference:
    """What lies between two runs of the same steps, relative."""

    gradient: float = 0.0
    loss: float = 0.0
    at: str = ""
    """The parameter whose gradient differs most, and the step."""

    @property
    def largest(self) -> float:
        """Of the two."""
        return max(self.gradient, self.loss)

    def said(self) -> str | float:
        """For people: 0 is equality to the bit."""
        return "equal to the bit" if self.largest == 0 else float(f"{self.largest:.2g}")


def between(mine: TrialResult, theirs: TrialResult) -> Difference:
    """Compare what two trials tell of the same steps.

    Raises:
        ValueError: They tell of different parameters or numbers of steps, or of none.
    """
    if not mine.gradients or len(mine.gradients) != len(theirs.gradients):
        raise ValueError(f"{len(mine.gradients)} and {len(theirs.gradients)} steps were told of")
    steps = [largest_difference(one, other) for one, other in zip(mine.gradients, theirs.gradients, strict=True)]
    (gradient, name), number = max((found, step) for step, found in enumerate(steps, start=1))
    losses = [
        abs(one - other) / max(abs(other), 1e-8) if one != other else 0.0
        for one, other in zip(mine.losses, theirs.losses, strict=False)
    ]
    loss = max((math.inf if math.isnan(each) else each for each in losses), default=0.0)
    return Difference(gradient, loss, f"{name}, step {number}" if name else "")


def verdict(winner: Difference, itself: Difference, allowed: float | None) -> dict[str, Any]:
    """What a certificate says of the numbers.

    Args:
        winner: Between the tuned setting and the reference.
        itself: Between two runs of the reference.
        allowed: By rule 3; None where a lossy technique leaves nothing to hold it to.
    """
    said: dict[str, Any] = {"reference_against_itself": itself.said(), "difference": winner.said()}
    if winner.at:
        said["largest_at"] = winner.at
    if allowed is None:
        return {"agrees": None, **said, "tolerance": "none: a lossy technique is in use"}
    noise = _NOISE_MARGIN * itself.largest
    if noise >= 1:  # as large as the gradients are: a wrong winner would agree too
        return {"agrees": None, **said, "tolerance": "none: the reference differs too much from itself"}
    tolerance = max(allowed, noise)
    if noise > allowed:
        why = f"{_NOISE_MARGIN:g} times what the reference differs from itself"
    else:
        why = "half of the digits: sums in another order" if allowed else "bitwise techniques"
    return {"agrees": winner.largest <= tolerance, **said, "tolerance": float(f"{tolerance:.2g}"), "tolerance_is": why}


def numerics(driver: Driver, choice: Choice) -> dict[str, Any]:
    """The part of a certificate that holds `choice` against the reference: three short trials at most.

    Every failure of these trials is a line in it, never an error: the search has its winner.
    """
    runs = _Runs(driver)
    for tried, (reference, budgeted) in enumerate(_references(driver, choice)):
        dropout = reference.execution == choice.execution
        repeats = _repeats_to_the_bit(driver, reference)
        if repeats and reference == choice:
            return {"reference": _named(reference), "trials": repeats, **verdict(Difference(), Difference(), 0.0)}
        first = runs.run(reference, dropout=dropout, budgeted=budgeted)
        if first is None or (first.status == "oom" and tried < _FURTHER_TRIES):
            continue
        if first.status != "ok":
            return {"not_run": f"the reference: {first.status}, {first.reason}"}
        second = first if repeats else runs.run(reference, dropout=dropout, budgeted=budgeted)
        mine = second if reference == choice else runs.run(choice, dropout=dropout)
        if second is None or mine is None or second.status != "ok" or mine.status != "ok":
            failed = next((each for each in (second, mine) if each is not None and each.status != "ok"), None)
            return {"not_run": f"{failed.status}, {failed.reason}" if failed else "stopped"}
        return {
            "reference": _named(reference) + ("" if budgeted else ", which does not fit, without the budget"),
            "steps": STEPS,
            "dropout": dropout,
            **_compared(driver, choice, reference, mine, first, second),
        }
    return {"not_run": "stopped" if driver.control.stopping else "no reference fits"}


def _repeats_to_the_bit(driver: Driver, reference: Choice) -> int:
    """In how many trials of the study `reference` gave the same first gradients and the same losses, 0 for fewer than two."""
    results = [
        each.result
        for each in driver.finished
        if each.job.scored.choice == reference and each.result.status == "ok" and each.result.gradients_sha256
    ]
    shortest = min((len(each.losses) for each in results), default=0)
    told = {(each.gradients_sha256, tuple(each.losses[:shortest])) for each in results}
    return len(results) if len(results) > 1 and len(told) == 1 and shortest > 1 else 0


def _named(choice: Choice) -> str:
    return choice.summary if choice.techniques else f"plain · {choice.summary}"


def _compared(
    driver: Driver, choice: Choice, reference: Choice, mine: TrialResult, first: TrialResult, second: TrialResult
) -> dict[str, Any]:
    try:
        return verdict(between(mine, first), between(second, first), _allowed(choice, reference, driver.unit))
    except ValueError as error:
        return {"agrees": None, "not_compared": str(error)}


def _allowed(choice: Choice, reference: Choice, unit: float) -> float | None:
    """Rule 3; `unit` is one rounding of the dtype."""
    classes = {each.exactly() for each in (*choice.techniques, *reference.techniques)}
    if Exactness.LOSSY in classes:
        return None
    return math.sqrt(unit) if Exactness.REORDERED in classes or choice.execution != reference.execution else 0.0


def _references(driver: Driver, winner: Choice) -> Iterator[tuple[Choice, bool]]:
    """By rule 1, the best first: what is predicted to fit, then what runs without the budget; and whether each has the budget."""
    setup, beyond = driver.setup, list[Scored]()
    by_size = sorted(_same_samples(setup, winner.execution), key=lambda each: -(each.micro_batch or 0))
    sharded = [{"sharding.states": "ddp"}, {"sharding.states": "fsdp"}] if setup.ranks > 1 else [{}]
    for recompute in ({}, {"recompute": "full"}):
        for base in sharded:
            for execution in by_size:
                scored = first_that_fits(setup.scorer, execution, base | recompute)
                if isinstance(scored, Reason):
                    continue
                if driver.pruner.reason(scored.prediction) is None:
                    yield scored.choice, True
                else:
                    beyond.append(scored)
    has_bytes = setup.hardware.usable_bytes(setup.ranks) * _SURELY_FREE
    here = setup.hardware.local_ranks(setup.ranks) if setup.device == "cpu" else 1
    for scored in beyond:
        if scored.prediction.peak_reserved_bytes * here <= has_bytes:
            yield scored.choice, False


def _same_samples(setup: Setup, winner: Execution) -> set[Execution]:
    """Ways to run the samples of the winner's step, also where the search itself does not cut the batch but may."""
    samples = (winner.micro_batch or 1) * winner.accumulate
    found = {each for each in setup.space.executions if (each.micro_batch or 1) * each.accumulate == samples}
    found.add(Execution(micro_batch=winner.micro_batch, accumulate=winner.accumulate))
    return found.union(executions(samples, 1)) if setup.batch_adds_up and samples * setup.ranks == setup.global_batch else found


class _Runs:
    """Short trials beside the study."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._number = driver, _NUMBER

    def run(self, choice: Choice, *, dropout: bool, budgeted: bool = True) -> TrialResult | None:
        """The first steps of `choice`, within the search's budget or without one; None if the search is stopped meanwhile."""
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
            env={**choice.env(), **_DETERMINISTIC},
        )
        return driver.aside(trial)
