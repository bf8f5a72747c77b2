"""Gradients that stay, copied out of the piece in which FSDP2 has reduced them with others of their block: those may leave."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.gathered_rows import rows_of_gradients
from memtune.program import I32, Kind, Phase, Resource, Step


def with_own_gradients(step: Step, stays: npt.NDArray[np.bool_]) -> Step:
    """`step`, divided by FSDP2, with the gradients of some parameters of blocks in memory of their own once they are reduced.

    Args:
        step: All parameters of whose blocks are said to be in them.
        stays: (parameters,) whose gradients are copied; sums of earlier micro-batches have been.
    """
    columns, rows = columns_of(step.parameters), rows_of_gradients(step)
    mine, edit = rows.where(stays[rows.parameter]), Edit(step)
    if (mine.sums >= 0).any():
        edit.bytes[rows.sums] = np.bincount(mine.sums, mine.n_bytes, step.n_storages).astype(np.int64)[rows.sums]
        return edit.done()
    clones = edit.add_ops(
        "aten.clone.default",
        after=mine.after,
        phase=Phase.BACKWARD,
        resource=Resource.COMPUTE,
        traffic_bytes=2 * mine.n_bytes,
        call=step.op_call[mine.after],
    )
    edit.add_uses(clones, mine.raw)
    made = edit.add_storages(
        mine.n_bytes, producer=clones, kind=Kind.GRADIENT, held_until=step.held_until[mine.raw], owner=mine.parameter
    )
    gradient = columns.gradient.copy()
    gradient[mine.parameter] = made
    _read_by_the_optimizer(edit, step, rows.raw, mine.parameter, made)
    edit.parameters = replace(columns, gradient=gradient)
    return edit.done()


def _read_by_the_optimizer(edit: Edit, step: Step, raw: I32, parameter: I32, made: I32) -> None:
    """Each update of a weight reads its own gradient."""
    inside = step.use_phase == Phase.OPTIMIZER
    edit.drop_uses(inside & np.isin(step.use_storage, raw))
    of = np.full(len(step.parameters) + 1, -1, np.int32)  # its last entry serves -1
    of[parameter] = made
    weights = np.flatnonzero(inside & (of[step.parameter_of[step.use_storage]] >= 0))
    edit.add_uses(step.use_op[weights], of[step.parameter_of[step.use_storage[weights]]])
