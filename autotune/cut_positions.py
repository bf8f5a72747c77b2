"""Whether what the user's code does between the cut layers is right for a share of the positions.

The step with positions divided is compared op by op with that of the same layers cut, from the first block to the last:

1. The same ops run in the same order, but for the cut layers, dropouts and what is sent.
2. What is divided is treated alike at every position (`cut_ops`), and nothing draws random numbers.
3. An argument that is not divided comes from a storage that is not: a single position of a divided one is another on each rank.
4. No weight from outside of the blocks meets a share: the gradients of theirs alone are summed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from memtune.autotune.cut_ops import Op, count_divided, draws_nothing, forward_ops, wrong
from memtune.linear_pairs import Pair
from memtune.program import Phase, Recording, Step
from memtune.technique import Reason

_FIX = "parallel: {kind: tensor}"
_OF_BORDERS = ("memtune.all_gather_positions_.default", "aten.new_empty.default", "aten.narrow_copy.default")


def positions_differ(
    cut: Recording, divided: Recording, pairs: Iterable[Pair], degree: int, drops: Collection[str] = ()
) -> Reason | None:
    """Why `divided` is not the computation of `cut` on a share of the positions; None if it is (rules 1 to 4).

    Args:
        cut: A rank's step with `pairs` cut.
        divided: The same with positions divided as well.
        pairs: What is cut.
        degree: Into how many parts.
        drops: Modules that draw for all positions.
    """
    layers = {name for pair in pairs for name in (*pair.columns, pair.row)} | set(drops)
    mine, theirs = (_between(each, layers) for each in (cut, divided))
    if [op.name for op in mine] != [op.name for op in theirs]:
        return Reason("the blocks run other ops with a share of the positions", _FIX)
    outside = _outside(divided.step)
    for one, other in zip(mine, theirs, strict=True):
        where = other.module or "the model"
        if one.draws and not draws_nothing(other):
            return Reason(f"{one.name} in {where} draws random numbers, others for a share of the positions", _FIX)
        said = wrong(one.name, one.arguments, other.arguments, degree)
        if said:
            return Reason(f"{one.name} in {where} {said}", _FIX)
        shared = _shares(cut.step, divided.step, one, other, degree)
        n_divided, n_whole = count_divided(one.arguments, other.arguments, degree)
        if shared and n_whole > len(set(other.reads)) - len(shared):
            return Reason(f"{one.name} in {where} uses single positions of what is divided", _FIX)
        met = outside.keys() & set(other.reads)
        if met and n_divided:
            return Reason(f"{outside[min(met)]}, which is outside of the blocks, is used between them", _FIX)
    return None


def _outside(step: Step) -> dict[int, str]:
    """Trainable parameters of no block: storage and name."""
    prefixes = tuple(f"{block}." for block in step.blocks)
    return {p.storage: p.name for p in step.parameters if p.trainable and not p.name.startswith(prefixes)}


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
