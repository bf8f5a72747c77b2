"""What techniques that divide or replicate states see where ranks have parts of a model: the ranks that hold the same part.

Ranks are a grid of copies × parts (`runtime.parts`); a node of `k` ranks has `k / parts` that hold the same one, or a single one
(`technique.Target.among_copies`).
What the passes insert is put on the real ranks' links afterwards.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memtune.hardware import Hardware
from memtune.program import APART, Program, RankClass, Resource
from memtune.remembered import remembered


def one_part(program: Program, parts: int) -> Program:
    """`program` on the ranks that hold the same part; the groups of what the parts send are marked by their sign.

    Those of what the copies send, which an earlier pass has inserted, are as that pass made them. The whole step of a pipeline's
    rank, which nobody asks for again, is not remembered.
    """
    return _of_one_part(program, parts) if program.unrolled > 1 else _known(program, parts)


@remembered
def _known(program: Program, parts: int) -> Program:
    return _of_one_part(program, parts)


def _of_one_part(program: Program, parts: int) -> Program:
    step = program.step
    theirs = step.op_group // APART == parts - 1
    group = np.where(theirs, step.op_group % APART, -step.op_group).astype(np.int32)
    ranks = (RankClass(program.ranks // parts, replace(step, op_group=group)),)
    return replace(program, rank_classes=ranks)


def all_parts(program: Program, parts: int, hardware: Hardware) -> Program:
    """What passes have made of `one_part`, on all ranks: members of a group among copies are `parts` ranks apart."""
    step = program.step
    theirs = step.op_group > 1
    group = np.where(theirs, step.op_group + APART * (parts - 1), np.abs(step.op_group)).astype(np.int32)
    resource = step.op_resource
    if hardware.local_ranks(program.ranks * parts) <= parts:  # no two of them share a node
        resource = np.where(theirs & (resource == Resource.INTRA_LINK), Resource.INTER_LINK, resource).astype(np.uint8)
    ranks = (RankClass(program.ranks * parts, replace(step, op_group=group, op_resource=resource)),)
    return replace(program, rank_classes=ranks)
