"""Whether what the user's code does between the cut layers is right for a share of the positions.

The step with positions divided is compared op by op with that of the same layers cut, from the first block to the last:

1. The same ops run in the same order, but for the cut layers, dropouts and what is sent.
2. What is divided is treated alike at every position (`cut_ops`), and nothing draws random numbers.
3. An argument that is not divided comes from a storage that is not: a single position of a divided one is another on each rank.
   One that is divided comes from a storage that is: the first positions of a whole one are the first rank's.
4. No weight from outside of the blocks meets a share, nor does what is made of one: the gradients of theirs alone are summed.
5. Where attention is the runtime's (`apart`), query, key and value are divided by positions, and nothing outside of the blocks
   differs: what else leaves them has a share of the positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from memtune.autotune.cut_ops import Op, attends_apart, count_divided, draws_nothing, forward_ops, wrong
from memtune.linear_pairs import Pair
from memtune.program import Phase, Recording, Step
from memtune.technique import Reason

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
    """Why `divided` is not the computation of `cut` on a share of the positions; None if it is (rules 1 to 5).

    Args:
        cut: A rank's step with `pairs` cut.
        divided: The same with positions divided as well.
        pairs: What is cut.
        degree: Into how many parts.
        drops: Modules that draw for all positions.
        apart: Each share attends to itself, in the place of attention to all (rule 5).
        fix: What to do instead.
    """
    layers = {name for pair in pairs for name in (*pair.columns, pair.row)} | set(drops)
    mine, theirs = (_between(each, layers) for each in (cut, divided))
    if [op.name for op in mine] != [op.name for op in theirs]:
        return Reason("the blocks run other ops with a share of the positions", fix)
    if apart and not _same_outside(cut, divided):
        return Reason("what the blocks return beside their output has a share of the positions", fix)
    whole = {
        other.index
        for one, other in zip(mine, theirs, strict=True)
        if not count_divided(one.arguments, other.arguments, degree)[0]
    }
    outside, made = _outside(divided.step), _made_outside(divided.step, whole)
    for one, other in zip(mine, theirs, strict=True):
        where = other.module or "the model"
        if one.draws and not draws_nothing(other):
            return Reason(f"{one.name} in {where} draws random numbers, others for a share of the positions", fix)
        apart_here = apart and "scaled_dot_product" in one.name
        said = (attends_apart if apart_here else wrong)(one.name, one.arguments, other.arguments, degree)
        if said:
            return Reason(f"{one.name} in {where} {said}", fix)
        if other.index in whole:
            continue
        shared = _shares(cut.step, divided.step, one, other, degree)
        n_whole, from_whole = count_divided(one.arguments, other.arguments, degree)[1], set(other.reads) - shared
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
    """Trainable parameters of no block: storage and name."""
    prefixes = tuple(f"{block}." for block in step.blocks)
    return {p.storage: p.name for p in step.parameters if p.trainable and not p.name.startswith(prefixes)}


def _made_outside(step: Step, whole: Collection[int]) -> set[int]:
    """Storages that follow from trainable parameters of no block, up to the blocks and by those of their ops that are `whole`."""
    made = set(_outside(step))
    forward = np.flatnonzero(step.op_phase == Phase.FORWARD)
    blocks = forward[step.op_block[forward] >= 0]
    if not len(blocks):
        return made
    outputs: dict[int, list[int]] = {}
    for storage, op in enumerate(step.producer.tolist()):
        outputs.setdefault(op, []).append(storage)
    for op in forward[forward <= blocks[-1]].tolist():
        if step.names[step.op_name[op]] in _OF_BORDERS or (op >= blocks[0] and op not in whole):
            continue
        uses = slice(*np.searchsorted(step.use_op, [op, op + 1]).tolist())
        used = step.use_storage[uses]
        if made.intersection(used.tolist()):
            made.update(outputs.get(op, ()), used[step.use_mutates[uses] > 0].tolist())
    return made


def _same_outside(one: Recording, other: Recording) -> bool:
    """Whether the forward's ops before the first block and after the last one are the same, with the same arguments."""

    def ops(recording: Recording) -> list[tuple[str, list[object]]]:
        step = recording.step
        blocks = np.flatnonzero((step.op_block >= 0) & (step.op_phase == Phase.FORWARD))
        found = forward_ops(recording, np.ones(len(step.modules), bool))
        return [(op.name, op.arguments) for op in found if not blocks[0] <= op.index <= blocks[-1]]

    return ops(one) == ops(other)


def _between(recording: Recording, layers: set[str]) -> list[Op]:
    """Forward ops from the first block's to the last one's, without those of the cut layers, of dropouts and of the borders."""
    step = recording.step
    blocks = np.flatnonzero((step.op_block >= 0) & (step.op_phase == Phase.FORWARD))
    if not len(blocks):
        return []
    modules = np.array([name not in layers for name in step.modules], bool)
    found = forward_ops(recording, modules, int(blocks[0]), int(blocks[-1]) + 1)
    return [op for op in found if op.name not in _OF_BORDERS]


def _shares(cut: Step, divided: Step, one: Op, other: Op, degree: int) -> set[int]:
    """Storages that `other` reads and that hold a share of what `one` reads in their place."""
    if len(one.reads) != len(other.reads):
        return set()
    return {
        mine for whole, mine in zip(one.reads, other.reads, strict=True) if cut.bytes[whole] == degree * divided.bytes[mine] > 0
    }
