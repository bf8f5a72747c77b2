"""The region of a frozen schedule as a Step shows it: the whole model's forward and its backward, as an `OpGraph` with bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from memtune.calls import BATCH_NORMS, EMPTY
from memtune.program import I32, I64, Kind, Phase, Step
from memtune.schedule import OpGraph


@dataclass(frozen=True, eq=False)
class Region:
    """The model's part of a Step."""

    graph: OpGraph
    rows: I32
    """(n,) row of the step for each op."""
    carried: tuple[tuple[int, ...], ...]
    """(n,) rows that follow each op wherever it runs first: a gradient is added to the one of earlier micro-batches."""
    storages: I32
    """(m,) storage of the step for each value."""
    outside_until: I32
    """(m,) op of the region during which others still hold a value: its number, n_forward - 1 up to and including the loss,
    n_ops for ever, -1 never."""
    scratch_bytes: I64
    """(n,) what the kernel takes while it runs."""
    background_bytes: I64
    """(n,) bytes of all that is no value of the region while each op runs, without kernels' scratch."""
    between_bytes: int
    """The largest `background_bytes`, scratch included, between forward and backward: the loss."""
    after_bytes: int
    """The most that is live once the region is through."""

    bytes: I64
    """(m,) of each value."""


@lru_cache(maxsize=4)
def region_of(step: Step) -> Region | str:
    """The region of `step`, or why there is none that could run by itself."""
    forward = np.arange(int(step.enter[-1]), int(step.leave[-1]) + 1, dtype=np.int32)
    if int(step.enter[-1]) < 0 or (step.op_phase[forward] != Phase.FORWARD).any():
        return "the model's own forward was not seen"
    if step.model_calls > 1:
        return f"the model's forward runs {step.model_calls} times in a step, and this is for one forward and its backward"
    if (step.op_phase == Phase.RECOMPUTE).any():
        return "the model recomputes parts of itself already"
    inside = (step.op_phase == Phase.BACKWARD) & (step.op_module > 0)
    backward = np.flatnonzero(inside).astype(np.int32)
    if not len(backward):
        return "no backward of the model was seen"
    talks = step.op_group > 0
    if talks.any():
        return f"{step.names[step.op_name[int(talks.argmax())]]}: ranks exchange data in the middle of the step"
    adds = added_gradients(step)
    others = (step.op_phase == Phase.BACKWARD) & ~inside & ~adds
    if others[backward[0] : backward[-1]].any():
        return "other code runs in the middle of the model's backward"
    carried: dict[int, list[int]] = {}
    for row in np.flatnonzero(adds).tolist():
        carried.setdefault(int(np.searchsorted(backward, row)) - 1 + len(forward), []).append(row)
    rows = np.concatenate([forward, backward])
    return region_with(step.without_handing_over(rows), rows, len(forward), carried)


def region_among(region: Region, after: Step, rows: I32) -> Region:
    """`region` with the bytes that are besides it in `after`, where later passes have put other ops between its own.

    Args:
        region: As `region_of` found it; the passes kept its storages.
        after: The step after them.
        rows: (n,) row of `after` for each op of the region.
    """
    value_of = np.full(after.n_storages, -1, np.int32)
    value_of[region.storages] = np.arange(len(region.storages), dtype=np.int32)
    between = np.clip(np.searchsorted(rows, np.arange(after.n_ops), side="right") - 1, 0, len(rows) - 1)
    along: list[list[int]] = [[] for _ in rows]
    for row in range(int(rows[region.graph.n_forward]) + 1, int(rows[-1])):
        along[int(between[row])].append(row)
    carried = tuple(tuple(set(each) - {int(rows[op])}) for op, each in enumerate(along))
    found = _with_bytes(after, region.graph, rows, carried, region.storages, value_of)
    return replace(found, rows=region.rows, carried=region.carried)


def added_gradients(step: Step) -> npt.NDArray[np.bool_]:
    """(n,) ops that add a gradient to the one that is there."""
    mutates = (step.use_mutates == 1) & (step.kind[step.use_storage] == Kind.GRADIENT) & (step.producer[step.use_storage] < 0)
    found = np.zeros(step.n_ops, bool)
    found[step.use_op[mutates]] = True
    found &= step.op_phase == Phase.BACKWARD
    return found


def region_with(step: Step, rows: I32, n_forward: int, carried: dict[int, list[int]]) -> Region:
    """The region of these ops.

    Args:
        step: In which none of them takes over memory of what it reads.
        rows: (n,) of the ops, forward first.
        n_forward: How many of them are forward.
        carried: Op → rows that follow it.
    """
    n_ops = len(rows)
    op_at = np.full(step.n_ops + 1, -1, np.int32)  # the last entry serves producer -1
    op_at[rows] = np.arange(n_ops, dtype=np.int32)
    producer = op_at[step.producer]
    storages = np.flatnonzero((producer >= 0) & (step.kind != Kind.WORKSPACE)).astype(np.int32)
    storages = storages[np.argsort(producer[storages], kind="stable")]
    value_of = np.full(step.n_storages, -1, np.int32)
    value_of[storages] = np.arange(len(storages), dtype=np.int32)
    makes = _grouped(producer[storages], np.arange(len(storages), dtype=np.int32), n_ops)
    use_op, use_value = op_at[step.use_op], value_of[step.use_storage]
    names = tuple(step.names[name] for name in step.op_name[rows])
    by_shape = np.asarray([name in EMPTY for name in names] + [False])[use_op]
    mine = (use_op >= 0) & (use_value >= 0) & (producer[step.use_storage] != use_op) & ~by_shape
    reads = _grouped(use_op[mine], use_value[mine], n_ops)
    mutates = (step.use_mutates == 1) & (use_op >= 0)
    writes = _grouped(use_op[mine & mutates], use_value[mine & mutates], n_ops)
    abroad = {int(op) for op in use_op[mutates & (use_value < 0)] if names[op] not in BATCH_NORMS}
    random = frozenset(np.flatnonzero(step.op_rng[rows]).tolist())
    batch_norm = np.asarray([name in BATCH_NORMS for name in names] + [False])[use_op]  # in training it reads no statistics
    looks = (use_op >= 0) & (use_value < 0) & ~by_shape & ~batch_norm
    stale = _before_writes(step.use_storage, use_op, looks, mutates & (use_value < 0))
    once = frozenset(abroad | stale | set(np.flatnonzero(step.op_group[rows] > 0).tolist()))
    graph = OpGraph(names, n_forward, makes, reads, writes, random, once)
    along = tuple(tuple(carried.get(op, ())) for op in range(n_ops))
    return _with_bytes(step, graph, rows, along, storages, value_of)


def _before_writes(storage: I32, op: I32, reads: npt.NDArray[np.bool_], writes: npt.NDArray[np.bool_]) -> set[int]:
    """Ops that read something which a later op writes: run again after that, they would read something else."""
    last = np.full(int(storage.max(initial=-1)) + 1, -1, np.int32)
    np.maximum.at(last, storage[writes], op[writes])
    return set(op[reads & (op < last[storage])].tolist())


def _with_bytes(
    step: Step, graph: OpGraph, rows: I32, carried: tuple[tuple[int, ...], ...], storages: I32, value_of: I32
) -> Region:
    scratch = np.zeros(step.n_ops, np.int64)
    workspace = (step.kind == Kind.WORKSPACE) & (step.producer >= 0)
    np.add.at(scratch, step.producer[workspace], step.bytes[workspace])
    plain = step.live_bytes() - _live_of(step, storages)
    between = plain[rows[graph.n_forward - 1] + 1 : rows[graph.n_forward]].max(initial=0)
    until = _outside_until(step, graph, rows, carried, storages, value_of)
    return Region(
        graph, rows, carried, storages, until, scratch[rows], (plain - scratch)[rows],
        int(between), int(step.live_bytes()[rows[-1] + 1 :].max(initial=0)), step.bytes[storages],
    )  # fmt: skip


def _outside_until(
    step: Step, graph: OpGraph, rows: I32, carried: tuple[tuple[int, ...], ...], storages: I32, value_of: I32
) -> I32:
    """By whom else a value is held, told from what ops outside read and from what lives on when the region is through."""
    first, last = int(rows[graph.n_forward - 1]), int(rows[graph.n_forward])
    where = np.full(step.n_ops, -1, np.int32)  # region op that an outside op goes with, n_ops for what comes after
    where[first:last] = graph.n_forward - 1
    where[last:] = graph.n_ops
    where[rows] = -1
    for op, along in enumerate(carried):
        where[list(along)] = op
    until = np.full(len(storages), -1, np.int32)
    value = value_of[step.use_storage]
    read = (value >= 0) & (where[step.use_op] >= 0)
    np.maximum.at(until, value[read], where[step.use_op[read]])
    held, maker = step.held_until[storages], np.asarray(graph.maker, np.int32)
    by_others = (held > first) & (until < 0) & (maker < graph.n_forward) & ~_casts_of_parameters(step, graph, rows)[maker]
    until[by_others] = graph.n_forward - 1
    returned = value_of[step.returned]
    returned = returned[returned >= 0]
    until[returned] = np.maximum(until[returned], graph.n_forward - 1)
    until[held > rows[-1]] = graph.n_ops
    return until


def _casts_of_parameters(step: Step, graph: OpGraph, rows: I32) -> npt.NDArray[np.bool_]:
    """(n,) ops whose product autocast's cache holds; a region that runs by a schedule has none, it runs below autocast."""
    found = np.asarray([name == "aten._to_copy.default" for name in graph.names], bool)
    others = (step.kind[step.use_storage] != Kind.PARAMETER) & (step.producer[step.use_storage] != step.use_op)
    found[np.isin(rows, step.use_op[others])] = False
    return found


def _live_of(step: Step, storages: I32) -> I64:
    delta = np.zeros(step.n_ops + 1, np.int64)
    np.add.at(delta, step.producer[storages], step.bytes[storages])
    np.add.at(delta, np.minimum(step.end[storages], step.n_ops - 1) + 1, -step.bytes[storages])
    return np.cumsum(delta[:-1])


def _grouped(op: I32, value: I32, n_ops: int) -> tuple[tuple[int, ...], ...]:
    """(n,) the values of each op, ascending and each once."""
    found: list[set[int]] = [set() for _ in range(n_ops)]
    for at, each in zip(op.tolist(), value.tolist(), strict=True):
        found[at].add(each)
    return tuple(tuple(sorted(each)) for each in found)
