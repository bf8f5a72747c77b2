"""Check that the user's code between the partitioned layers is correct on a share of the positions.

The step with divided positions is compared op by op with that of the same partitioned layers, from the first
block to the last:

1. The same ops run in the same order, except for partitioned layers, dropouts and communication.
2. Divided tensors are treated alike at every position (`op_check`), and no op draws random numbers.
3. An undivided argument comes from an undivided storage: a single position of a divided one differs between
  ranks. A divided argument comes from a divided storage: the first positions of a whole one are the first
  rank's.
4. No weight outside of the blocks is combined with a share, nor is a result of one: only gradients of weights
  inside are summed.
5. If attention is the runtime's (`apart`), query, key and value are divided by positions, and nothing outside
  of the blocks differs: other outputs of blocks would have a share of the positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from memtune.autotune.record_parallel.op_check import (
    Op,
    attention_error,
    count_divided,
    draws_nothing,
    forward_ops,
    partition_error,
)
from memtune.program import (
    READS,
    Phase,
    Recording,
    Step,
)
from memtune.technique import Reason
from memtune.workload import Pair

_OF_BORDERS = ("memtune.all_gather_positions_.default", "aten.new_empty.default", "aten.narrow_copy.default")


def positions_differ(
    cut: Recording,
    divided: Recording,
    pairs: Iterable[Pair],
    degree: int,
    drops: Collection[str] = (),
    *,
    apart: bool = False,
    fix: str = "parallel: {kind: tensor}",
) -> Reason | None:
    """Return why `divided` is not the computation of `cut` on a share of the positions.

    None if it is (rules 1 to 5).

    Args:
        cut: A rank's step with `pairs` partitioned.
        divided: The same with positions divided as well.
        pairs: The partitioned layers.
        degree: Number of parts.
        drops: Modules that draw for all positions.
        apart: Each share attends to itself instead of to all (rule 5).
        fix: Advice for the user.
    """
    layers = {name for pair in pairs for name in (*pair.columns, pair.row)} | set(drops)
    mine, theirs = (_between(each, layers) for each in (cut, divided))
    if [op.name for op in mine] != [op.name for op in theirs]:
        return Reason("the blocks run other ops with a share of the positions", fix)
    if apart and not _same_outside(cut, divided):
        return Reason("what the blocks return in addition to their output has a share of the positions", fix)
    # Ops without a divided argument: they compute the same on every rank.
    whole = {
        other.index
        for one, other in zip(mine, theirs, strict=True)
        if not count_divided(one.arguments, other.arguments, degree)[0]
    }
    outside, made = _outside(divided.step), _made_outside(divided.step, whole)
    for one, other in zip(mine, theirs, strict=True):
        where = other.module or "the model"
        # With one seed all ranks would draw the numbers of the first positions.
        if one.draws and not draws_nothing(other):
            return Reason(
                f"{one.name} in {where} draws random numbers, others for a share of the positions", fix
            )
        apart_here = apart and "scaled_dot_product" in one.name
        error = (attention_error if apart_here else partition_error)(
            one.name, one.arguments, other.arguments, degree
        )
        if error:
            return Reason(f"{one.name} in {where} {error}", fix)
        if other.index in whole:
            continue
        shared = _shares(cut.step, divided.step, one, other, degree)
        n_whole = count_divided(one.arguments, other.arguments, degree)[1]
        from_whole = set(other.reads) - shared
        if shared and n_whole > len(from_whole):
            return Reason(f"{one.name} in {where} uses single positions of what is divided", fix)
        if n_whole < len(from_whole):
            return Reason(f"{one.name} in {where} uses the first positions of what is whole", fix)
        met = outside.keys() & from_whole
        if met:
            return Reason(f"{outside[min(met)]}, which is outside of the blocks, is used between them", fix)
        if made & from_whole:
            return Reason(f"{one.name} in {where} uses what weights outside of the blocks have made", fix)
    return None


def _outside(step: Step) -> dict[int, str]:
    """Return name by storage of the trainable parameters outside of all blocks."""
    prefixes = tuple(f"{block}." for block in step.blocks)
    return {p.storage: p.name for p in step.parameters if p.trainable and not p.name.startswith(prefixes)}


def _made_outside(step: Step, whole: Collection[int]) -> set[int]:
    """Return storages computed from trainable parameters outside of all blocks."""
    # Only ops before the blocks, and `whole` ops of the blocks, are followed.
    made = set(_outside(step))
    forward = np.flatnonzero(step.ops.phase == Phase.FORWARD)
    blocks = forward[step.ops.block[forward] >= 0]
    if not len(blocks):
        return made
    outputs: dict[int, list[int]] = {}
    for storage, op in enumerate(step.storages.producer.tolist()):
        outputs.setdefault(op, []).append(storage)
    for op in forward[forward <= blocks[-1]].tolist():
        if step.names[step.ops.name[op]] in _OF_BORDERS or (op >= blocks[0] and op not in whole):
            continue
        uses = slice(*np.searchsorted(step.uses.op, [op, op + 1]).tolist())
        used = step.uses.storage[uses]
        if made.intersection(used.tolist()):
            made.update(outputs.get(op, ()), used[step.uses.mode[uses] != READS].tolist())
    return made


def _same_outside(one: Recording, other: Recording) -> bool:
    """Return whether the forward's ops outside of the blocks are equal, with equal arguments."""

    def ops(recording: Recording) -> list[tuple[str, list[object]]]:
        step = recording.step
        blocks = np.flatnonzero((step.ops.block >= 0) & (step.ops.phase == Phase.FORWARD))
        found = forward_ops(recording, np.ones(len(step.modules), bool))
        inside = range(blocks[0], blocks[-1] + 1) if len(blocks) else ()
        return [(op.name, op.arguments) for op in found if op.index not in inside]

    return ops(one) == ops(other)


def _between(recording: Recording, layers: set[str]) -> list[Op]:
    """Return the forward ops of the blocks, except partitioned layers, dropouts and region boundaries."""
    step = recording.step
    blocks = np.flatnonzero((step.ops.block >= 0) & (step.ops.phase == Phase.FORWARD))
    if not len(blocks):
        return []
    modules = np.array([name not in layers for name in step.modules], bool)
    found = forward_ops(recording, modules, int(blocks[0]), int(blocks[-1]) + 1)
    return [op for op in found if op.name not in _OF_BORDERS]


def _shares(cut: Step, divided: Step, one: Op, other: Op, degree: int) -> set[int]:
    """Return the storages that `other` reads and that hold a share of those `one` reads instead."""
    # Storages of a call are compared by position, which needs as many of them.
    if len(one.reads) != len(other.reads):
        return set()
    return {
        mine
        for whole, mine in zip(one.reads, other.reads, strict=True)
        if cut.storages.bytes[whole] == degree * divided.storages.bytes[mine] > 0
    }
