"""Run a list of passes where ranks hold parts of a model: the ranks that each technique sees, and its pass.

1. A technique that shards or replicates states (`Effects.among_copies`) sees only the ranks that hold the
  same part, and a target of these. Ranks are a grid of copies × parts (`parallel.ranks.replica_groups`); a
  node of `k` ranks has `k / parts` that hold the same part, or one (`technique.Target.among_copies`).
  The ops that it inserts are put on the links of all ranks afterwards.
2. Passes run stage by stage (`PassStage`), within a stage in the order of their slots. Each works on the
  result of the passes before it; after a refusal none runs.
3. The technique in `sharding.parallel` gives the number of ranks that hold a copy together, even if its pass
  has already run.
4. In a pipeline each rank has its own step at the end, and its states are sharded among the copies of its
  stages then: in its whole step, or, if each micro-batch is reduced (`Effects.every_micro_batch`), in the
  step of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from memtune.hardware import Hardware
from memtune.program import APART, Program, RankClass, Resource, memoized
from memtune.refusals import steps_others
from memtune.search_spaces import SLOTS
from memtune.technique import PassStage, Plan, Reason, Target, Technique, lacking

N = TypeVar("N")


def visible_parts(technique: Technique, chosen: Mapping[str, Technique], ranks: int) -> int:
    """Return the ranks that hold a copy of the model together, if `technique` works among copies; else 1."""
    parallel = chosen.get("sharding.parallel") if technique.effects.among_copies else None
    return 1 if parallel is None else parallel.ranks_of_a_copy(ranks)


def visible_target(target: Target, parts: int) -> Target:
    """Return `target` as seen by a technique that sees only the ranks holding the same of `parts` parts."""
    return target if parts == 1 else target.among_copies(parts)


def check_fit(program: Program, technique: Technique, target: Target, parts: int) -> Reason | None:
    """Return why `technique` does not fit `program`, None if it does; `target` is that of all ranks."""
    if technique.needs and (reason := lacking(target.hardware.platform, technique.needs)) is not None:
        return reason
    inner = () if target.optimizer is None else target.optimizer.inner
    return steps_others(technique, inner) or technique.fits(
        program if parts == 1 else on_replicas(program, parts), visible_target(target, parts)
    )


def run_pass(
    program: Program, technique: Technique, target: Target, parts: int, plan: Plan | None = None
) -> tuple[Program, Plan]:
    """Return `program` after the pass of `technique` on all ranks, and its plan, solved unless given."""
    before, seen = program if parts == 1 else on_replicas(program, parts), visible_target(target, parts)
    if plan is None:
        plan = technique.plan(before, seen)
    if technique.effects.among_copies and program.stages is not None:
        return program, plan  # rule 4: the states are sharded per stage later
    after = technique.rewrite(before, plan, seen)
    if after is before:
        return program, plan
    return after if parts == 1 else on_every_rank(after, parts, target.hardware), plan


def run_passes(
    start: N,
    techniques: Iterable[Technique],
    *,
    passed: Callable[[N, Technique, PassStage], N],
    refused: Callable[[N], bool],
    stages: Iterable[PassStage] = PassStage,
) -> N:
    """Return the result of a list of passes, by rule 2.

    Args:
        start: The value that the first pass works on.
        techniques: In the order of their slots.
        passed: Returns the result of a technique's pass in a stage; in `PassStage.AXES` by `check_fit` and
            `run_pass`, or from a cache.
        refused: Returns True once a technique has refused.
        stages: The stages that run.
    """
    now, passes = start, [(technique, technique.passes()) for technique in techniques]
    for stage in stages:
        for technique, declared in passes:
            if refused(now):
                return now
            if stage in declared:
                now = passed(now, technique, stage)
    return now


class TrackedSlots(Mapping[str, Technique]):
    """Techniques by slot that record which slots were read, absent ones too.

    A cached result of a technique is valid wherever the slots that it read hold the same techniques.
    """

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


def on_replicas(program: Program, parts: int) -> Program:
    """Return `program` on the ranks with the same part; a sign marks groups between parts."""
    # Groups between the copies, inserted by an earlier pass, are unchanged. The complete step of a
    # pipeline's rank is used once and therefore not cached.
    return _of_one_part(program, parts) if program.unrolled > 1 else _known(program, parts)


@memoized
def _known(program: Program, parts: int) -> Program:
    return _of_one_part(program, parts)


def _of_one_part(program: Program, parts: int) -> Program:
    step = program.step
    theirs = step.ops.group // APART == parts - 1
    group = np.where(theirs, step.ops.group % APART, -step.ops.group).astype(np.int32)
    ranks = (RankClass(program.ranks // parts, step.with_ops(group=group)),)
    return replace(program, rank_classes=ranks)


def on_every_rank(program: Program, parts: int, hardware: Hardware) -> Program:
    """Return the result of passes on `on_replicas`, on all ranks: groups are `parts` ranks apart."""
    step = program.step
    theirs = step.ops.group > 1
    group = np.where(theirs, step.ops.group + APART * (parts - 1), np.abs(step.ops.group)).astype(np.int32)
    resource = step.ops.resource
    if hardware.local_ranks(program.ranks * parts) <= parts:  # no two of them share a node
        resource = np.where(theirs & (resource == Resource.INTRA_LINK), Resource.INTER_LINK, resource).astype(
            np.uint8
        )
    ranks = (RankClass(program.ranks * parts, step.with_ops(group=group, resource=resource)),)
    return replace(program, rank_classes=ranks)
