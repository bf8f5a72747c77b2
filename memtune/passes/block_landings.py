"""Gradients of the blocks' parameters as they land, for `passes.stream`: averaged by replicas, put where their weights were."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.gathered_rows import gathers_of, rows_of_gradients
from memtune.passes.shares import raw_gradients
from memtune.program import FOREVER, I32, I64, Kind, Phase, Resource, Step


@dataclass(frozen=True, eq=False)
class Landings:
    """Gradients of the blocks' parameters as autograd puts them in place, one row each."""

    parameter: I32
    raw: I32
    """What this micro-batch makes."""
    sums: I32
    """What it is added to, -1 in the only or first micro-batch."""
    after: I32
    moment: I32
    n_bytes: I64

    @classmethod
    def of(cls, step: Step) -> Landings:
        """Those of `step`."""
        columns = columns_of(step.parameters)
        if gathers_of(step) is not None:
            rows = rows_of_gradients(step)
            moment = (2 * len(step.blocks) - 1 - columns.block[rows.parameter]).astype(np.int32)
            return cls(rows.parameter, rows.raw, rows.sums, rows.after, moment, rows.n_bytes)
        raw = raw_gradients(step)
        parameter_of = np.full(step.n_storages, -1, np.int32)
        mine = np.flatnonzero((columns.gradient >= 0) & (columns.block >= 0) & (raw >= 0)).astype(np.int32)
        parameter_of[columns.gradient[mine]] = mine
        parameter = parameter_of[step.landing]
        parameter = parameter[parameter >= 0]
        gradient = columns.gradient[parameter]
        summed = step.producer[gradient] < 0
        after = np.where(summed, adding(step)[gradient], step.ready_after[raw[parameter]]).astype(np.int32)
        order = np.argsort(after, kind="stable")
        moment = 2 * len(step.blocks) - 1 - columns.block[parameter]
        sums = np.where(summed, gradient, -1).astype(np.int32)
        parts = (parameter, raw[parameter], sums, after, moment.astype(np.int32))
        parameter, made, sums, after, moment = (column[order] for column in parts)
        return cls(parameter, made, sums, after, moment, step.bytes[made])


def adding(step: Step) -> I32:
    """(m,) the op of backward that adds to a sum of earlier micro-batches, -1 for none."""
    adds = (step.use_mutates == 1) & (step.producer[step.use_storage] < 0) & (step.use_phase < Phase.BOUNDARY)
    found = np.full(step.n_storages, -1, np.int32)
    found[step.use_storage[adds]] = step.use_op[adds]
    return found


@functools.lru_cache(maxsize=8)
def weights_are_free(step: Step) -> bool:
    """Whether no op needs a weight of a block when its gradient has landed, and rows of it are nobody's to gather."""
    landings = Landings.of(step)
    if gathers_of(step) is not None:
        return False
    after = np.full(step.n_storages, FOREVER, np.int32)
    after[columns_of(step.parameters).storage[landings.parameter]] = landings.after
    return not ((step.use_op > after[step.use_storage]) & (step.use_phase < Phase.BOUNDARY)).any()


def average(edit: Edit, step: Step, after: I32, n_bytes: I64, gradients: I32, ranks: int) -> I32:
    """Replicas average each of `gradients`, of so many bytes, after an op; returns the averages."""
    ops = edit.add_ops(
        "memtune.all_reduce_.default", after=after, phase=Phase.BACKWARD, resource=Resource.INTRA_LINK, traffic_bytes=n_bytes,
        call=step.op_call[after], group=ranks,
    )  # fmt: skip
    edit.add_uses(ops, gradients, mutates=True)
    return ops


def averaged_there(step: Step, stays: npt.NDArray[np.bool_], ranks: int) -> Step:
    """`step` with an average of the gradient of each of the parameters `stays`, in each micro-batch: of the sum up to then.

    Args:
        step: One that `passes.stream.not_in_layers` has nothing to say about.
        stays: (parameters,) parameters of blocks.
        ranks: That have all weights; with one there is nothing to average.
    """
    landings = Landings.of(step)
    mine = np.flatnonzero(stays[landings.parameter])
    if ranks == 1 or not len(mine):
        return step
    edit, after = Edit(step), landings.after[mine]
    gradients = columns_of(step.parameters).gradient[landings.parameter[mine]]
    ops = average(edit, step, after, landings.n_bytes[mine], gradients, ranks)
    if after[-1] == np.flatnonzero(step.op_phase < Phase.BOUNDARY)[-1]:
        edit.hold_to_the_end_of_backward(int(ops[-1]))
    return edit.done()


def leave_from(edit: Edit, landings: Landings, placed: I32, copies: I32, there: I32) -> None:
    """A gradient is let go when it is in the place `there` of its weight, from where it leaves."""
    edit.held_until[landings.raw] = -1
    edit.kind[landings.raw] = Kind.TEMPORARY
    edit.add_uses(placed, landings.raw)
    edit.add_uses(placed, there, mutates=True)
    edit.add_uses(copies, there)


def on_their_way(step: Step) -> I64:
    """(n,) bytes of gradients that are held on the device for their copies alone while each op of `step` runs."""
    downs = (step.op_name == step.names.index("memtune.to_host.default")) & (step.op_phase == Phase.BACKWARD)
    leave = downs[step.use_op]
    gradient, at = step.use_storage[leave], step.use_op[leave]
    needed = np.full(step.n_storages, -1, np.int32)
    np.maximum.at(needed, step.use_storage[~leave], step.use_op[~leave])
    delta = np.zeros(step.n_ops + 1, np.int64)
    np.add.at(delta, np.maximum(needed[gradient] + 1, at), step.bytes[gradient])
    np.add.at(delta, np.minimum(step.end[gradient], step.n_ops - 1) + 1, -step.bytes[gradient])
    found: I64 = np.cumsum(delta[:-1])
    return found
