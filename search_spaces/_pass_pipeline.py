"""How a list of passes runs where ranks hold parts of a model: what each technique sees, and what becomes of
its pass.

Four rules:

1. A technique that divides or replicates states (`Effects.among_copies`) sees the ranks that hold the same
   part alone, and a target of these; what it inserts is put on the links of all ranks
   (`memtune.parallel.ranks.replica_view`).
2. Passes run stage by stage (`PassStage`), within a stage in the order of their axes. Each works on what the
   passes before it made; after a refusal none runs.
3. How many ranks hold a copy together is what the technique under `sharding.parallel` says, whose pass may
   have been before.
4. In a pipeline each rank has a step of its own at the end, and its states are divided among the copies of
   its stages then: in its whole step, or, where each micro-batch is reduced (`Effects.every_micro_batch`), in
   the one of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from memtune.parallel.pipeline import piped, pipelined
from memtune.parallel.ranks import all_parts, one_part
from memtune.program import Program, Step
from memtune.search_spaces import SLOTS
from memtune.technique import PassStage, Plan, Reason, Target, Technique

N = TypeVar("N")


def parts_seen(technique: Technique, chosen: Mapping[str, Technique], ranks: int) -> int:
    """Of `ranks`, those that hold a copy of the model together, for `technique` if it works among the copies;
    else 1.
    """
    parallel = chosen.get("sharding.parallel") if technique.effects.among_copies else None
    return 1 if parallel is None else parallel.ranks_of_a_copy(ranks)


def target_seen(target: Target, parts: int) -> Target:
    """What `target` is for who sees the ranks that hold the same of `parts` parts alone."""
    return target if parts == 1 else target.among_copies(parts)


def judged(program: Program, technique: Technique, target: Target, parts: int) -> Reason | None:
    """Why `technique` does not fit `program`, None where it does; `target` is that of all ranks."""
    return technique.fits(program if parts == 1 else one_part(program, parts), target_seen(target, parts))


def made(program: Program, technique: Technique, target: Target, parts: int) -> tuple[Program, Plan]:
    """What the pass of `technique`, which fits, makes of `program`, and its plan; `target` is that of all
    ranks.
    """
    before, seen = program if parts == 1 else one_part(program, parts), target_seen(target, parts)
    plan = technique.plan(before, seen)
    if technique.effects.among_copies and program.stages is not None:
        return program, plan  # rule 4
    after = technique.rewrite(before, plan, seen)
    if after is before:
        return program, plan
    return after if parts == 1 else all_parts(after, parts, target.hardware), plan


def run(
    start: N,
    techniques: Iterable[Technique],
    *,
    passed: Callable[[N, Technique, PassStage], N],
    refused: Callable[[N], bool],
    stages: Iterable[PassStage] = PassStage,
) -> N:
    """What a list of passes makes, by rule 2.

    Args:
        start: What the first one works on.
        techniques: In the order of their axes.
        passed: What the pass of a technique in a stage makes; that in `PassStage.AXES` by `judged` and
            `made`, or from memory.
        refused: Whether a technique has refused.
        stages: Those that run.
    """
    now, passes = start, [(technique, technique.passes()) for technique in techniques]
    for stage in stages:
        for technique, declared in passes:
            if refused(now):
                return now
            if stage in declared:
                now = passed(now, technique, stage)
    return now


def steps_of_stages(program: Program, target: Target, ranks: Sequence[int] | None = None) -> list[Step]:
    """The step of `ranks` of a pipeline (None: of each), from `program` of one that has all stages, by rule
    4.

    Raises:
        ValueError: The blocks are no chain that can be cut there.
    """
    how, times = piped(program, target.hardware)
    states = target.chosen.get("sharding.states")
    if states is None or not states.effects.among_copies:
        return pipelined(program.step, how, ranks)
    every_micro_batch, alone = states.effects.every_micro_batch, replace(how, copies=1)
    whole = replace(program, accumulate=times, unrolled=how.micro_batches, stages=None)
    seen = replace(program, stages=None) if every_micro_batch else whole

    def divide(step: Step) -> Step:
        return made(seen.with_step(step), states, target, how.ranks)[0].step

    if every_micro_batch:
        kept = not getattr(states, "reshard_after_forward", True)
        return pipelined(program.step, alone, ranks, divide, kept=kept)
    return [divide(step) for step in pipelined(program.step, alone, ranks)]


# What a technique looks at of the others, so that what it said is used again only where it would say the
# same.
class Watched(Mapping[str, Technique]):
    """Techniques by slot that note which slots were looked at, absent ones too."""

    def __init__(self, chosen: Mapping[str, Technique]) -> None:
        self._chosen = chosen
        self.seen: dict[str, Technique | None] = {}

    def __getitem__(self, slot: str) -> Technique:
        self.seen[slot] = self._chosen.get(slot)
        return self._chosen[slot]

    def __iter__(self) -> Iterator[str]:
        self.seen = {slot: self._chosen.get(slot) for slot in SLOTS}
        return iter(self._chosen)

    def __len__(self) -> int:
        self.seen = {slot: self._chosen.get(slot) for slot in SLOTS}
        return len(self._chosen)
