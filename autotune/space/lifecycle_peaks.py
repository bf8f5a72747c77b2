"""Predict the device memory of every moment of a run.

A config that trains may still fail to load, evaluate or save.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memtune.autotune.predict import simulate
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.program import Program, Step, checkpoint, evaluation, first_step
from memtune.search_spaces._pass_pipeline import visible_target
from memtune.technique import Reason, Target

_ONLY_FOR_BACKWARD = ("recompute", "offload.activations")


@dataclass(frozen=True)
class Moment:
    """One moment of a run, on the rank with the largest peak."""

    name: str
    peak_bytes: int
    reserved_bytes: int

    def to_dict(self, budget_bytes: int | None) -> dict[str, Any]:
        """Return the row of a certificate."""
        fits = budget_bytes is None or self.peak_bytes <= budget_bytes
        return {"peak_bytes": self.peak_bytes, "reserved_bytes": self.reserved_bytes, "fits": fits}


def moments(rewriter: Rewriter, candidate: Candidate) -> tuple[Moment, ...]:
    """Return first step, steady step, resume, evaluation and checkpoint of `candidate`, and where batches
    vary in size a step on one that is half their spread larger than the largest drawn.
    """
    # A resumed run has optimizer state before its first forward, so its first step is a steady one. An
    # evaluation runs one micro-batch without gradients; a checkpoint is `Tuned.state_dict()`, which
    # gathers sharded states on every rank. Under a pipeline there is no evaluation, because it would
    # call the model outside of `Tuned.step`.
    program, target = candidate.program, replace(rewriter.target, chosen=candidate.choice.chosen)
    shard = _factors(candidate.choice, target)
    whole = checkpoint(
        _with_all_stages(rewriter, candidate),
        parameters=shard.get("parameters", 1),
        optimizer=shard.get("optimizer", 1),
        stages_messages=target.device == "cpu",
        uploads=target.device != "cpu",
    )
    steady = _moment("steady_step", program.step, program, target)
    first = _moment("first_step", first_step(program.step), program, target)
    always = [first, steady, replace(steady, name="resume")]
    above = simulate(program, target.hardware).batch_spread_bytes[1]
    if above:
        always.append(Moment("larger_batch", steady.peak_bytes + above, steady.reserved_bytes + above))
    at_end = _moment("checkpoint", whole, program, target)
    if program.unrolled > 1:
        return (*always, at_end)
    evaluated = _moment(
        "evaluation", evaluation(_without_recompute(rewriter, candidate).step), program, target
    )
    return (*always, evaluated, at_end)


def _moment(name: str, step: Step, program: Program, target: Target) -> Moment:
    prediction = simulate(program.with_step(step), target.hardware)
    return Moment(name, prediction.peak_allocated_bytes, prediction.peak_reserved_bytes)


def _with_all_stages(rewriter: Rewriter, candidate: Candidate) -> Step:
    """Return the plain step with the weights and states of a rank that has received all stages'."""
    program, size = candidate.program, candidate.choice.execution.micro_batch
    return program.step if program.unrolled == 1 or size is None else rewriter.recording.at(size)


def _factors(choice: Choice, target: Target) -> dict[str, int]:
    """Return the number of ranks over which each state is sharded, from the mechanism's record."""
    parts = choice.technique("sharding.parallel").ranks_of_a_copy(target.ranks)
    found: dict[str, int] = (
        choice.technique("sharding.states").record(visible_target(target, parts)).get("states.shard", {})
    )
    return found


def _without_recompute(rewriter: Rewriter, candidate: Candidate) -> Program:
    """Return one micro-batch without techniques on saved tensors, or with them if the rest does not fit."""
    settings = candidate.choice.with_execution(accumulate=1)
    kept = {slot: each for slot, each in settings.chosen.items() if slot not in _ONLY_FOR_BACKWARD}
    program = rewriter.program(Choice.of(settings.execution, kept))
    return candidate.program if isinstance(program, Reason) else program
