"""View of a program for techniques that shard or replicate states if ranks hold parts of a model: the ranks
that hold the same part.

Ranks are a grid of copies × parts (`parallel.ranks.replica_groups`); a node of `k` ranks has `k / parts` that
hold the same part, or a single one (`technique.Target.among_copies`). Collectives that the passes insert are
mapped to the links of the real ranks afterwards.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memtune.hardware import Hardware
from memtune.program import APART, Program, RankClass, Resource, memoized


def on_replicas(program: Program, parts: int) -> Program:
    """Return `program` on the ranks that hold the same part; groups of collectives between parts are marked
    by their sign.

    Groups between the copies, inserted by an earlier pass, are unchanged. The complete step of a pipeline's
    rank is used once and therefore not cached.
    """
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
    """Return the result of passes on `on_replicas`, on all ranks: members of a group among copies are `parts`
    ranks apart.
    """
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
