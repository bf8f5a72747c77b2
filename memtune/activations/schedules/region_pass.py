"""Region of a schedule in a Step: the whole model's forward and backward as an `OpGraph` with bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from memtune.program import (
    BATCH_NORMS,
    EMPTY,
    FOREVER,
    I32,
    I64,
    MERGED_OPS,
    OWN_GENERATOR,
    WRITES,
    Kind,
    OpGraph,
    Phase,
    Step,
    columns_of,
)


@dataclass(frozen=True, eq=False)
class Region:
    """The model's forward and backward in a Step."""

    graph: OpGraph
    rows: I32
    """(n,) row of the step for each op."""
    carried: tuple[tuple[int, ...], ...]
    """(n,) rows that follow each op wherever it runs first: additions of its gradient to earlier ones."""
    storages: I32
    """(m,) storage of the step for each value."""
    outside_until: I32
    """(m,) op of the region during which a value is still held outside: its number, n_forward - 1 up to and
    including the loss, n_ops for all later ops, -1 for never.
    """
    scratch_bytes: I64
    """(n,) kernel workspace."""
    background_bytes: I64
    """(n,) bytes of all other storages while each op runs, without kernel workspace."""
    between_bytes: int
    """Largest `background_bytes` between forward and backward, including workspace: the loss."""
    after_bytes: int
    """Largest number of live bytes after the region."""

    bytes: I64
    """(m,) of each value."""

    @cached_property
    def reads_of_row(self) -> Mapping[int, tuple[int, ...]]:
        """Row of the step → storages of the values that its op reads."""
        storages = self.storages.tolist()
        return {
            row: tuple(storages[value] for value in values)
            for row, values in zip(self.rows.tolist(), self.graph.reads, strict=True)
        }


@lru_cache(maxsize=4)
def region_of(step: Step) -> Region | str:
    """Return the region of `step`, or the reason why no schedule can run it."""
    forward = np.arange(int(step.forward_starts[-1]), int(step.forward_ends[-1]) + 1, dtype=np.int32)
    if int(step.forward_starts[-1]) < 0 or (step.ops.phase[forward] != Phase.FORWARD).any():
        return "the model's own forward was not recorded"
    # A second forward would be a region of its own, with values of both alive at once.
    if step.model_calls > 1:
        return (
            f"the model's forward runs {step.model_calls} times in a step, and a schedule is for one forward"
            " and its backward"
        )
    if (step.ops.phase == Phase.RECOMPUTE).any():
        return "the model recomputes parts of itself already"
    # The loss is outside of every module; its backward comes before the region's.
    inside = (step.ops.phase == Phase.BACKWARD) & (step.ops.module > 0)
    adds = added_gradients(step) | _added_from_outside(step, inside)
    inside &= ~adds
    backward = np.flatnonzero(inside).astype(np.int32)
    if not len(backward):
        return "no backward of the model was recorded"
    talks = step.ops.group > 0
    if talks.any():
        return (
            f"{step.names[step.ops.name[int(talks.argmax())]]}: ranks exchange data in the middle of the step"
        )
    others = (step.ops.phase == Phase.BACKWARD) & ~inside & ~adds
    if others[backward[0] : backward[-1]].any():
        return "other code runs in the middle of the model's backward"
    carried: dict[int, list[int]] = {}
    for row in np.flatnonzero(adds).tolist():
        carried.setdefault(int(np.searchsorted(backward, row)) - 1 + len(forward), []).append(row)
    # A schedule decides lifetimes itself, so donated memory counts as a storage of its own.
    rows = np.concatenate([forward, backward])
    return region_with(step.without_donations(rows), rows, len(forward), carried)


def region_among(region: Region, after: Step, rows: I32) -> Region:
    """Return `region` with the background bytes of `after`, where later passes have inserted ops.

    Args:
        region: The result of `region_of`; the passes kept its storages.
        after: The step after them.
        rows: (n,) row of `after` for each op of the region.
    """
    value_of = np.full(after.storages.n, -1, np.int32)
    value_of[region.storages] = np.arange(len(region.storages), dtype=np.int32)
    between = np.clip(np.searchsorted(rows, np.arange(after.ops.n), side="right") - 1, 0, len(rows) - 1)
    along: list[list[int]] = [[] for _ in rows]
    for row in range(int(rows[region.graph.n_forward]) + 1, int(rows[-1])):
        along[int(between[row])].append(row)
    carried = tuple(tuple(set(each) - {int(rows[op])}) for op, each in enumerate(along))
    found = _with_bytes(after, region.graph, rows, carried, region.storages, value_of)
    return replace(found, rows=region.rows, carried=region.carried)


def added_gradients(step: Step) -> npt.NDArray[np.bool_]:
    """Return (n,) ops that add a gradient to an existing one."""
    mutates = (
        (step.uses.mode == WRITES)
        & (step.storages.kind[step.uses.storage] == Kind.GRADIENT)
        & (step.storages.producer[step.uses.storage] < 0)
    )
    found = np.zeros(step.ops.n, bool)
    found[step.uses.op[mutates]] = True
    found &= step.ops.phase == Phase.BACKWARD
    return found


def _added_from_outside(step: Step, inside: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return (n,) ops in which autograd adds a gradient to one of the loss's own, as of a penalty."""
    producer = step.storages.producer
    sums = np.zeros(step.ops.n, bool)
    sums[producer[(step.storages.kind == Kind.GRADIENT) & (producer >= 0)]] = True
    sums &= inside & np.isin(step.ops.name, [i for i, name in enumerate(step.names) if name in _SUMS])
    outside = (step.ops.phase == Phase.BACKWARD) & ~inside
    read = producer[step.uses.storage]
    found = np.zeros(step.ops.n, bool)
    found[step.uses.op[(read >= 0) & outside[read]]] = True
    return found & sums


def region_with(step: Step, rows: I32, n_forward: int, carried: dict[int, list[int]]) -> Region:
    """Return the region of these ops.

    Args:
        step: A step in which none of them reuses the memory of its arguments.
        rows: (n,) rows of the ops, forward first.
        n_forward: Number of ops in forward.
        carried: Op → rows that follow it.
    """
    n_ops = len(rows)
    op_at = np.full(step.ops.n + 1, -1, np.int32)  # the last entry serves producer -1
    op_at[rows] = np.arange(n_ops, dtype=np.int32)
    producer = op_at[step.storages.producer]
    storages = np.flatnonzero((producer >= 0) & (step.storages.kind != Kind.WORKSPACE)).astype(np.int32)
    storages = storages[np.argsort(producer[storages], kind="stable")]
    value_of = np.full(step.storages.n, -1, np.int32)
    value_of[storages] = np.arange(len(storages), dtype=np.int32)
    makes = _grouped(producer[storages], np.arange(len(storages), dtype=np.int32), n_ops)
    use_op, use_value = op_at[step.uses.op], value_of[step.uses.storage]
    names = tuple(step.names[name] for name in step.ops.name[rows])
    by_shape = np.asarray([name in EMPTY for name in names] + [False])[use_op]
    # An op that takes only shapes (`empty_like`) does not keep its argument alive.
    mine = (use_op >= 0) & (use_value >= 0) & (producer[step.uses.storage] != use_op) & ~by_shape
    reads = _grouped(use_op[mine], use_value[mine], n_ops)
    mutates = (step.uses.mode == WRITES) & (use_op >= 0)
    writes = _grouped(use_op[mine & mutates], use_value[mine & mutates], n_ops)
    # Writing outside twice is wrong, except for BatchNorm: a replay restores its statistics.
    abroad = {int(op) for op in use_op[mutates & (use_value < 0)] if names[op] not in BATCH_NORMS}
    random = frozenset(np.flatnonzero(step.ops.rng[rows]).tolist())
    # In training BatchNorm reads no running statistics, so it may run again after their update.
    batch_norm = np.asarray([name in BATCH_NORMS for name in names] + [False])[use_op]
    reads_outside = (use_op >= 0) & (use_value < 0) & ~by_shape & ~batch_norm
    stale = _before_writes(step.uses.storage, use_op, reads_outside, mutates & (use_value < 0))
    once = frozenset(abroad | stale | set(np.flatnonzero(step.ops.group[rows] > 0).tolist()))
    graph = OpGraph(names, n_forward, makes, reads, writes, random, once)
    along = tuple(tuple(carried.get(op, ())) for op in range(n_ops))
    return _with_bytes(step, graph, rows, along, storages, value_of)


def _before_writes(
    storage: I32, op: I32, reads: npt.NDArray[np.bool_], writes: npt.NDArray[np.bool_]
) -> set[int]:
    """Return ops that read a storage which a later op writes."""
    # If they ran again after that, they would read another value.
    last = np.full(int(storage.max(initial=-1)) + 1, -1, np.int32)
    np.maximum.at(last, storage[writes], op[writes])
    return set(op[reads & (op < last[storage])].tolist())


def _with_bytes(
    step: Step, graph: OpGraph, rows: I32, carried: tuple[tuple[int, ...], ...], storages: I32, value_of: I32
) -> Region:
    scratch = np.zeros(step.ops.n, np.int64)
    workspace = (step.storages.kind == Kind.WORKSPACE) & (step.storages.producer >= 0)
    np.add.at(scratch, step.storages.producer[workspace], step.storages.bytes[workspace])
    # The bytes that no schedule of this region changes.
    plain = step.live_bytes() - _live_of(step, storages)
    between = plain[rows[graph.n_forward - 1] + 1 : rows[graph.n_forward]].max(initial=0)
    until = _outside_until(step, graph, rows, carried, storages, value_of)
    return Region(
        graph=graph,
        rows=rows,
        carried=carried,
        storages=storages,
        outside_until=until,
        scratch_bytes=scratch[rows],
        background_bytes=(plain - scratch)[rows],
        between_bytes=int(between),
        after_bytes=int(step.live_bytes()[rows[-1] + 1 :].max(initial=0)),
        bytes=step.storages.bytes[storages],
    )


def _outside_until(
    step: Step, graph: OpGraph, rows: I32, carried: tuple[tuple[int, ...], ...], storages: I32, value_of: I32
) -> I32:
    """Return the last op at which each value is held outside the region, by readers or by lifetime."""
    first, last = int(rows[graph.n_forward - 1]), int(rows[graph.n_forward])
    where = np.full(step.ops.n, -1, np.int32)  # region op that an outside op follows, n_ops after the region
    where[first:last] = graph.n_forward - 1
    where[last:] = graph.n_ops
    where[rows] = -1
    for op, along in enumerate(carried):
        where[list(along)] = op
    until = np.full(len(storages), -1, np.int32)
    value = value_of[step.uses.storage]
    read = (value >= 0) & (where[step.uses.op] >= 0)
    np.maximum.at(until, value[read], where[step.uses.op[read]])
    held, maker = step.storages.held_until[storages], np.asarray(graph.maker, np.int32)
    by_others = (
        (held > first)
        & (until < 0)
        & (maker < graph.n_forward)
        & ~_casts_of_parameters(step, graph, rows)[maker]
    )
    # Held by Python without a reader, e.g. a local of the model's forward: gone when that returns.
    until[by_others] = graph.n_forward - 1
    returned = value_of[step.returned]
    returned = returned[returned >= 0]
    until[returned] = np.maximum(until[returned], graph.n_forward - 1)
    # After the region: gradients, and whatever the user keeps.
    until[held > rows[-1]] = graph.n_ops
    return until


def _casts_of_parameters(step: Step, graph: OpGraph, rows: I32) -> npt.NDArray[np.bool_]:
    """Return (n,) ops whose output autocast caches; a scheduled region runs below autocast, without cache."""
    found = np.asarray([name == "aten._to_copy.default" for name in graph.names], bool)
    others = (step.storages.kind[step.uses.storage] != Kind.PARAMETER) & (
        step.storages.producer[step.uses.storage] != step.uses.op
    )
    # A cast of an activation is not cached, only one of a leaf parameter.
    found[np.isin(rows, step.uses.op[others])] = False
    return found


def _live_of(step: Step, storages: I32) -> I64:
    delta = np.zeros(step.ops.n + 1, np.int64)
    np.add.at(delta, step.storages.producer[storages], step.storages.bytes[storages])
    np.add.at(
        delta, np.minimum(step.freed_after[storages], step.ops.n - 1) + 1, -step.storages.bytes[storages]
    )
    return np.cumsum(delta[:-1])


def _grouped(op: I32, value: I32, n_ops: int) -> tuple[tuple[int, ...], ...]:
    """Return (n,) the values of each op, ascending and each once."""
    found: list[set[int]] = [set() for _ in range(n_ops)]
    for at, each in zip(op.tolist(), value.tolist(), strict=True):
        found[at].add(each)
    return tuple(tuple(sorted(each)) for each in found)


# Data dependence: a schedule can run a region only if its ops are the same for every batch.
_SIZES = frozenset(
    f"aten.{name}"
    for name in (
        "nonzero.default",
        "masked_select.default",
        "_unique2.default",
        "unique_dim.default",
        "unique_consecutive.default",
        "bincount.default",
    )
)
"""Ops whose output size depends on values."""
_LOOKED_AT = frozenset(f"aten.{name}" for name in ("all.default", "all.dim", "any.default", "any.dim"))
"""Ops whose outputs Python branches on."""
_NUMBER = "aten._local_scalar_dense.default"
_SUMS = ("aten.add.Tensor", "aten.add_.Tensor")


@lru_cache(maxsize=8)
def not_foreseen(step: Step, region: Region) -> str:
    """Return why no schedule of `region` can be made before it runs, '' if one can.

    Reasons are state that forward replaces or trains itself, data dependence, lazily conjugated values, an op
    of a translated step that represents several on CUDA, and user generators: schedules draw from torch's own
    generators, whose states they know.
    """
    if odd := _sets_state(step, region):
        return odd
    odd = depends_on_data(step, region)
    if odd:
        return f"{odd} runs in the model: the ops after it depend on the data"
    if step.lazy_values:
        return "an op reads lazily conjugated values (complex numbers), which schedules do not support"
    several = several_ops_on_cuda(region)
    if several:
        return f"{several} represents several ops on CUDA, which are not known before the model runs there"
    given = region.rows[step.ops.rng[region.rows] == OWN_GENERATOR]
    if not np.size(given):
        return ""
    return (
        f"{step.names[step.ops.name[given[0]]]} in the model draws from a generator of its own, and a"
        " schedule from torch's default generators only"
    )


def _sets_state(step: Step, region: Region) -> str:
    """Return why generated code does not do what forward does to the model's state, '' if it does."""
    storages = step.storages
    is_replaced = (storages.kind == Kind.BUFFER) & (storages.producer < 0) & (storages.held_until != FOREVER)
    if is_replaced.any():
        return (
            "the model's forward sets a buffer to another tensor; write into it, as buffer.copy_(value) does"
        )
    columns = columns_of(step.parameters)
    mine = (step.uses.mode == WRITES) & np.isin(step.uses.op, region.rows)
    written = np.flatnonzero(np.isin(columns.storage, step.uses.storage[mine]) & columns.trainable)
    return (
        f"the model's forward writes into its parameter {columns.names[written[0]]}" if len(written) else ""
    )


def several_ops_on_cuda(region: Region) -> str:
    """Return the first op of `region` that is several ops in the live model, '' for none."""
    if not MERGED_OPS.keys() & set(region.graph.names):
        return ""
    pairs = zip(region.graph.names, region.graph.makes, strict=True)
    return next((name for name, made in pairs if MERGED_OPS.get(name, len(made)) != len(made)), "")


def depends_on_data(step: Step, region: Region) -> str:
    """Return the name of the first op of `region` that gives Python information about data, '' for none.

    A number that code reads (`.item()`) is no op: it is named `aten._local_scalar_dense.default`. Values that
    follow from constants, such as a mask made from positions, are no data.
    """
    names = region.graph.names
    if not (_SIZES | _LOOKED_AT) & set(names) and not step.read_by_host.size:
        return ""
    constant = _from_constants(step)
    for name, row in zip(names, region.rows.tolist(), strict=True):
        if name in _SIZES or (name in _LOOKED_AT and not constant[row]):
            return name
    for storage in step.read_by_host[step.read_by_host >= 0].tolist():
        row = int(step.storages.producer[storage])
        writes = step.uses.op[(step.uses.storage == storage) & (step.uses.mode == WRITES)].tolist()
        if row < 0 or not all(constant[each] for each in (row, *writes)):
            return _NUMBER
    return ""


def _from_constants(step: Step) -> list[bool]:
    """Return (n,) whether an op's output follows from constants, without random numbers."""
    constant = [True] * step.ops.n
    # Storages that existed before the step, or are computed from one.
    varies = [int(row) < 0 for row in step.storages.producer]
    made: list[list[int]] = [[] for _ in constant]
    for storage, row in enumerate(step.storages.producer.tolist()):
        if row >= 0:
            made[row].append(storage)
    read: list[list[int]] = [[] for _ in constant]
    written: list[list[int]] = [[] for _ in constant]
    for row, storage, mutates in zip(
        step.uses.op.tolist(), step.uses.storage.tolist(), step.uses.mode.tolist(), strict=True
    ):
        (written if mutates else read)[row].append(storage)
    for row in range(step.ops.n):
        constant[row] = not step.ops.rng[row] and not any(
            varies[storage] for storage in (*read[row], *written[row])
        )
        if not constant[row]:
            for storage in (*made[row], *written[row]):
                varies[storage] = True
    return constant
