"""What every moment of a run takes of the device, predicted: a config that trains may still not load, evaluate or save."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from memtune.autotune.candidates import Candidate, Choice, Rewriter
from memtune.autotune.record import SEED, start_session, step_of, why
from memtune.autotune.simulate import simulate
from memtune.autotune.translate import translate
from memtune.batches import tensors_of
from memtune.passes.moments import checkpoint, evaluation, first_step
from memtune.program import Program, Recording, Step
from memtune.runtime.tiers import HOST, tier
from memtune.runtime.workspace import WorkspaceTable
from memtune.search_spaces._passes import target_seen
from memtune.technique import Reason, Target
from memtune.workload import Workload

DRAWS = 32
"""Batches that are made to see whether their sizes vary, and which is the largest."""
_ONLY_FOR_BACKWARD = ("recompute", "offload.activations")


@dataclass(frozen=True)
class Moment:
    """One moment of a run, on the heaviest rank."""

    name: str
    peak_bytes: int
    reserved_bytes: int
    note: str = ""
    """What the number rests on, where that is not the recording alone."""

    def to_dict(self, budget_bytes: int | None) -> dict[str, Any]:
        """As it stands in a certificate."""
        fits = budget_bytes is None or self.peak_bytes <= budget_bytes
        numbers = {"peak_bytes": self.peak_bytes, "reserved_bytes": self.reserved_bytes, "fits": fits}
        return numbers | ({"note": self.note} if self.note else {})


def moments(rewriter: Rewriter, candidate: Candidate) -> tuple[Moment, ...]:
    """First step, steady step, resume, evaluation and checkpoint of `candidate`.

    A resumed run has the optimizer's state before its first forward, so its first step is a steady one. An evaluation runs one
    micro-batch without gradients; a checkpoint is `Tuned.state_dict()`, which makes whole what is divided, on every rank. Under a
    pipeline there is no evaluation, which would be a call of the model outside of `Tuned.step`.
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
    always = (_moment("first_step", first_step(program.step), program, target), steady, replace(steady, name="resume"))
    at_end = _moment("checkpoint", whole, program, target)
    if program.unrolled > 1:
        return (*always, at_end)
    evaluated = _moment("evaluation", evaluation(_without_recompute(rewriter, candidate).step), program, target)
    return (*always, evaluated, at_end)


def largest_batch(
    workload: Workload, recording: Recording, target: Target, choice: Choice, workspace: WorkspaceTable | None = None
) -> Moment | Reason | None:
    """The steady step on the largest of `DRAWS` batches; None where all have one size, a reason where it cannot be told.

    Args:
        workload: Its `batch` is called.
        recording: Of `workload`, before translation; the step is recorded once more with the largest batch, on the same rung.
        target: What it is predicted for.
        choice: What is applied.
        workspace: Where the scratch of CPU kernels is looked up.
    """
    size = choice.execution.micro_batch
    assert size is not None
    try:
        batches = _draw(workload, size)
        sizes = [sum(each.nbytes for each in tensors_of(batch)) for batch in batches]
        if min(sizes) == max(sizes):
            return None
        session = replace(start_session(workload, recording.rung), target=target.hardware.device)
        session = replace(session, workload=_OneBatch(**vars(workload), drawn=batches[sizes.index(max(sizes))]))
        session.warm_up(size)
        trace = session.traced(size)
    except Exception as error:  # of user code, on a batch that the recording has not seen
        return Reason(f"the largest batch could not be recorded: {why(error, workload)}")
    exact, hints = {**recording.exact, size: step_of(trace, workspace)}, {**recording.hints, size: trace.hints}
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
    """The step whose weights and state a rank has when stages have sent it theirs: the plain one, with what it has itself."""
    program, size = candidate.program, candidate.choice.execution.micro_batch
    return program.step if program.unrolled == 1 or size is None else rewriter.recording.at(size)


def _factors(choice: Choice, target: Target) -> dict[str, int]:
    """Over how many ranks each state is divided, as the mechanism's record says."""
    parts = choice.technique("sharding.parallel").ranks_of_a_copy(target.ranks)
    found: dict[str, int] = choice.technique("sharding.states").record(target_seen(target, parts)).get("states.shard", {})
    return found


def _without_recompute(rewriter: Rewriter, candidate: Candidate) -> Program:
    """One micro-batch without what only acts on tensors that autograd saves; with it where the rest does not stand alone."""
    settings = candidate.choice.with_execution(accumulate=1)
    kept = {slot: each for slot, each in settings.chosen.items() if slot not in _ONLY_FOR_BACKWARD}
    program = rewriter.program(Choice.of(settings.execution, kept))
    return candidate.program if isinstance(program, Reason) else program


def _draw(workload: Workload, size: int) -> list[Any]:
    with torch.random.fork_rng(devices=[]), tier(HOST):
        torch.manual_seed(SEED)
        return [workload.make_batch(size) for _ in range(DRAWS)]


@dataclass(frozen=True)
class _OneBatch(Workload):
    """A workload whose batches are all the same one."""

    drawn: Any = None

    def make_batch(self, size: int) -> Any:
        return self.drawn
