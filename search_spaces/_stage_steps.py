"""Steps of a pipeline's ranks, with the states of each stage sharded over its copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from memtune.parallel.pipeline import piped, pipelined
from memtune.program import Program, Step
from memtune.search_spaces._pass_pipeline import run_pass
from memtune.technique import Target


def steps_of_stages(program: Program, target: Target, ranks: Sequence[int] | None = None) -> list[Step]:
    """Return the steps of `ranks` of a pipeline (None: of all) from the `program` of one rank with all
    stages, by rule 4 of `_pass_pipeline`.

    Raises:
        ValueError: The blocks are not a chain that can be cut there.
    """
    settings, times = piped(program, target.hardware)
    states = target.chosen.get("sharding.states")
    if states is None or not states.effects.among_copies:
        return pipelined(program.step, settings, ranks)
    every_micro_batch, alone = states.effects.every_micro_batch, replace(settings, copies=1)
    whole = replace(program, accumulate=times, unrolled=settings.micro_batches, stages=None)
    seen = replace(program, stages=None) if every_micro_batch else whole

    def divide(step: Step) -> Step:
        return run_pass(seen.with_step(step), states, target, settings.ranks)[0].step

    if every_micro_batch:
        kept = not getattr(states, "reshard_after_forward", True)
        return pipelined(program.step, alone, ranks, divide, kept=kept)
    return [divide(step) for step in pipelined(program.step, alone, ranks)]
