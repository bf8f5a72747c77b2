"""Predict the device memory of every moment of a run.

A config that trains may still fail to load, evaluate or save.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from memtune.autotune.predict import simulate
from memtune.autotune.record import SEED, error_line, start_session, step_of
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.autotune.translate import translate
from memtune.memory import WorkspaceTable
from memtune.program import Program, Recording, Step, checkpoint, evaluation, first_step
from memtune.runtime import HOST, tier
from memtune.search_spaces._pass_pipeline import visible_target
from memtune.technique import Reason, Target
from memtune.workload import Workload, tensors_of

DRAWS = 32
"""Batches drawn to find out whether sizes vary, and the largest one."""
_ONLY_FOR_BACKWARD = ("recompute", "offload.activations")


@dataclass(frozen=True)
class Moment:
    """One moment of a run, on the rank with the largest peak."""

    name: str
    peak_bytes: int
    reserved_bytes: int
    note: str = ""
    """Assumption behind the number, beyond the recording."""

    def to_dict(self, budget_bytes: int | None) -> dict[str, Any]:
        """Return the row of a certificate."""
        fits = budget_bytes is None or self.peak_bytes <= budget_bytes
        numbers = {"peak_bytes": self.peak_bytes, "reserved_bytes": self.reserved_bytes, "fits": fits}
        return numbers | ({"note": self.note} if self.note else {})


def moments(rewriter: Rewriter, candidate: Candidate) -> tuple[Moment, ...]:
    """Return first step, steady step, resume, evaluation and checkpoint of `candidate`.

    A resumed run has optimizer state before its first forward, so its first step is a steady one. An
    evaluation runs one micro-batch without gradients; a checkpoint is `Tuned.state_dict()`, which gathers
    sharded states on every rank. Under a pipeline there is no evaluation, because it would call the model
    outside of `Tuned.step`.
    """
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
    always = (
        _moment("first_step", first_step(program.step), program, target),
        steady,
        replace(steady, name="resume"),
    )
    at_end = _moment("checkpoint", whole, program, target)
    if program.unrolled > 1:
        return (*always, at_end)
    evaluated = _moment(
        "evaluation", evaluation(_without_recompute(rewriter, candidate).step), program, target
    )
    return (*always, evaluated, at_end)


def largest_batch(
    workload: Workload,
    recording: Recording,
    target: Target,
    choice: Choice,
    workspace: WorkspaceTable | None = None,
) -> Moment | Reason | None:
    """Return the steady step on the largest of `DRAWS` batches.

    None if sizes do not vary or the user declares `worst_batch`, which was recorded; a Reason if unknown.

    Args:
        workload: Its `batch` is called.
        recording: Of `workload`, before translation; the step is recorded again with the largest batch, on
            the same rung.
        target: Hardware, ranks and budget of the prediction.
        choice: The settings to apply.
        workspace: Table of CPU kernels' scratch.
    """
    if workload.has_worst_batch:
        return None
    size = choice.execution.micro_batch
    assert size is not None
    try:
        batches = _draw(workload, size)
        sizes = [sum(each.nbytes for each in tensors_of(batch)) for batch in batches]
        if min(sizes) == max(sizes):
            return None
        session = replace(start_session(workload, recording.rung), target=target.hardware.device)
        session = replace(
            session, workload=_ConstantBatch(**vars(workload), drawn=batches[sizes.index(max(sizes))])
        )
        session.warm_up(size)
        trace = session.traced(size)
    except Exception as error:  # of user code, on a batch that the recording has not seen
        return Reason(f"the largest batch could not be recorded: {error_line(error, workload)}")
    exact, hints = (
        {**recording.exact, size: step_of(trace, workspace)},
        {**recording.hints, size: trace.hints},
    )
    rewriter = Rewriter(translate(replace(recording, exact=exact, hints=hints), target.hardware), target)
    program = rewriter.program(choice)
    if isinstance(program, Reason):
        return program
    note = f"the largest of {DRAWS} batches, {max(sizes) / max(min(sizes), 1):.3g} times the smallest"
    return replace(_moment("largest_batch", program.step, program, rewriter.target), note=note)


def _moment(name: str, step: Step, program: Program, target: Target) -> Moment:
    prediction = simulate(program.with_step(step), target.hardware)
    return Moment(name, prediction.peak_allocated_bytes, prediction.peak_reserved_bytes)


def _with_all_stages(rewriter: Rewriter, candidate: Candidate) -> Step:
    """Return the step with the weights and states of a rank that has received the other stages'.

    The plain step.
    """
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


def _draw(workload: Workload, size: int) -> list[Any]:
    with torch.random.fork_rng(devices=[]), tier(HOST):
        torch.manual_seed(SEED)
        return [workload.make_batch(size) for _ in range(DRAWS)]


@dataclass(frozen=True)
class _ConstantBatch(Workload):
    """A workload that returns the same batch each time."""

    drawn: Any = None

    def make_batch(self, size: int) -> Any:
        return self.drawn
