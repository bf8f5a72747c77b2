"""Shards of a step's parameters, gradients and state as columns, shared by all sharding passes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.program.edit import Edit
from memtune.program.memo import memoized
from memtune.program.parameter_columns import ParameterColumns, columns_of, numel_of
from memtune.program.step import F64, I32, I64, WRITES, Kind, Phase, Resource, Step

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Shards:
    """Rank 0's shard of every parameter: the largest one, to which the others are padded; one entry each."""

    shapes: tuple[tuple[int, ...], ...]
    numel: I64
    n_bytes: I64
    uneven: Mask
    """The number of ranks does not divide the first dimension."""


@functools.lru_cache(maxsize=64)
def shards_of(columns: ParameterColumns, degree: int) -> Shards:
    """Return the shards of every parameter over `degree` ranks."""
    # FSDP2 shards dimension 0 by `torch.chunk`: rank 0 gets the ceiling, later ranks the rest.
    shapes = tuple((-(-shape[0] // degree), *shape[1:]) if shape else shape for shape in columns.shapes)
    numel = numel_of(shapes)
    uneven = np.asarray([not shape or shape[0] % degree > 0 for shape in columns.shapes], bool)
    return Shards(shapes, numel, numel * columns.itemsize, uneven)


def add_storages(edit: Edit, parts: list[tuple[I64, I32, I64, Kind]]) -> I32:
    """Add storages of several kinds; return their rows.

    Args:
        edit: The edit.
        parts: Per kind: positions among the new rows, producers, bytes, kind.
    """
    count = sum(len(place) for place, *_ in parts)
    return edit.add_storages(
        column(count, np.int64, *((place, n_bytes) for place, _, n_bytes, _ in parts)),
        producer=column(count, np.int32, *((place, producer) for place, producer, _, _ in parts)),
        kind=column(count, np.uint8, *((place, kind) for place, _, _, kind in parts)),
    )


def raw_gradients(step: Step) -> I32:
    """Return (parameters,) the storage of this micro-batch's gradient before accumulation, -1 for none."""
    gradient = columns_of(step.parameters).gradient
    raw = np.full(len(gradient), -1, np.int32)
    # (m + 1,) parameter of each gradient; the last entry is for parameters without a gradient (-1).
    index = np.full(step.storages.n + 1, -1, np.int32)
    index[gradient] = np.arange(len(gradient), dtype=np.int32)
    index[-1] = -1
    made = (gradient >= 0) & (step.storages.producer[gradient] >= 0)
    raw[made] = gradient[made]
    adds = (
        (step.uses.mode == WRITES)
        & (step.storages.producer[step.uses.storage] < 0)
        & (index[step.uses.storage] >= 0)
    )
    adds &= step.use_phase < Phase.BOUNDARY
    is_sum = np.zeros(step.storages.n, bool)
    is_sum[step.uses.storage[adds]] = True
    added = np.full(step.ops.n, -1, np.int32)  # storage that each of these ops adds to a sum
    others = ~is_sum[step.uses.storage]
    # Reversed, so that an op's first operand wins if it has several.
    added[step.uses.op[others][::-1]] = step.uses.storage[others][::-1]
    raw[index[step.uses.storage[adds]]] = added[step.uses.op[adds]]
    return raw


def adding_ops(step: Step) -> I32:
    """Return (m,) the op of backward that adds to a sum of earlier micro-batches, -1 for none."""
    adds = (
        (step.uses.mode == WRITES)
        & (step.storages.producer[step.uses.storage] < 0)
        & (step.use_phase < Phase.BOUNDARY)
    )
    found = np.full(step.storages.n, -1, np.int32)
    found[step.uses.storage[adds]] = step.uses.op[adds]
    return found


def complete_after(step: Step, gradient: I32, raw: I32) -> I32:
    """Return the op after which each gradient is complete, `raw` being what this micro-batch produces."""
    # A sum exists before this micro-batch, so no op produces it: it is complete when `raw` has been added.
    summed = step.storages.producer[gradient] < 0
    at = np.where(summed, adding_ops(step)[gradient], step.storages.grad_ready_after[raw])
    return at.astype(np.int32)


@functools.lru_cache(maxsize=8)
def optimizer_moments(step: Step) -> I32:
    """Return the state storages as large as their parameter; the others count steps."""
    columns = columns_of(step.parameters)
    state = np.flatnonzero(
        (step.storages.kind == Kind.OPTIMIZER) & (step.storages.producer < 0) & (step.storages.owner >= 0)
    ).astype(np.int32)
    owner = step.storages.owner[state]
    # A step counter is smaller than its parameter.
    moments: I32 = state[step.storages.bytes[state] == columns.n_bytes[owner]]
    return moments


def moments_of_parameters(step: Step, selected: npt.NDArray[np.intp]) -> tuple[I32, npt.NDArray[np.intp]]:
    """Return the moments of the ascending parameters `selected`, and each one's index in `selected`."""
    moments, chosen = optimizer_moments(step), np.zeros(len(step.parameters), bool)
    chosen[selected] = True
    moments = moments[chosen[step.storages.owner[moments]]]
    return moments, np.searchsorted(selected, step.storages.owner[moments])


@functools.lru_cache(maxsize=8)
def sharded_storages(step: Step) -> tuple[I32, I32]:
    """Return the storages that are sharded with their parameter, and the row of that parameter.

    Raw gradients are not: they exist in full before they are reduced.
    """
    columns = columns_of(step.parameters)
    selected = np.flatnonzero(step.storages.owner >= 0).astype(np.int32)
    owner = step.storages.owner[selected]
    raw = np.zeros(step.storages.n + 1, bool)
    raw[raw_gradients(step)] = True
    whole = (
        # State of another shape (a step counter, Adafactor's factors) is not sharded with the parameter.
        (step.storages.bytes[selected] % columns.numel[owner] == 0)
        & (step.storages.bytes[selected] >= columns.numel[owner])
        & ~raw[selected]
    )
    return selected[whole], owner[whole]


def resize_to_shards(edit: Edit, step: Step, ratio: F64, storages: I32, owner: I32) -> None:
    """Scale storages by the `ratio` of their owners' shards, and flops and traffic of the updates.

    Args:
        edit: The edit that is changed.
        step: The step that it edits.
        ratio: (parameters,) elements of the shard over those of the whole.
        storages: Rows of the storages that are sharded.
        owner: Row of the parameter of each.
    """
    edit.storages.bytes[storages] = np.round(edit.storages.bytes[storages] * ratio[owner]).astype(np.int64)
    rows, share = _shares_of_updates(step, ratio.tobytes())
    flops, traffic = step.ops.flops.copy(), step.ops.traffic_bytes.copy()
    flops[rows] *= share
    traffic[rows] = np.round(traffic[rows] * share).astype(np.int64)
    edit.set_ops(flops=flops, traffic_bytes=traffic)


@functools.lru_cache(maxsize=8)
def _shares_of_updates(step: Step, ratio_bytes: bytes) -> tuple[I32, F64]:
    """Return the ops of the update, and the bytes that each uses sharded over those it uses whole."""
    # Equal for all techniques that shard a step by one ratio.
    columns, ratio = columns_of(step.parameters), np.frombuffer(ratio_bytes, np.float64)
    # A bucket holds gradients of several parameters: its share is theirs together.
    storage, owner = sharded_storages(step)
    for tensors in (columns.storage, columns.gradient):
        there = np.flatnonzero(tensors >= 0).astype(np.int32)
        storage, owner = np.append(storage, tensors[there]), np.append(owner, there)
    numel = columns.numel[owner].astype(np.float64)
    whole = np.bincount(storage, numel, step.storages.n)
    share = np.bincount(storage, numel * ratio[owner], step.storages.n) / np.maximum(whole, 1)
    computes = (step.ops.phase == Phase.OPTIMIZER) & (step.ops.resource == Resource.COMPUTE)
    uses = np.flatnonzero(computes[step.uses.op] & (whole[step.uses.storage] > 0))
    used = step.uses.storage[uses]
    n_bytes = step.storages.bytes[used].astype(np.float64)
    before = np.bincount(step.uses.op[uses], n_bytes, step.ops.n)
    after = np.bincount(step.uses.op[uses], n_bytes * share[used], step.ops.n)
    rows = np.flatnonzero(before > 0).astype(np.int32)
    return rows, np.asarray(after[rows] / before[rows], np.float64)


@dataclass(frozen=True, eq=False)
class Ragged:
    """A ragged array: parts of different lengths, concatenated."""

    values: npt.NDArray[Any]
    count: I64
    """(parts,) number of values of each part."""

    @cached_property
    def starts(self) -> I64:
        """(parts,) position of each part's first value."""
        return np.cumsum(self.count) - self.count

    @cached_property
    def part(self) -> I64:
        """(values,) part of each value."""
        return np.repeat(np.arange(len(self.count)), self.count)

    @cached_property
    def _within(self) -> I64:
        return np.arange(len(self.values)) - self.starts[self.part]

    def places(self, begin: I64) -> I64:
        """Return (values,) the position of each value if part `i` begins at `begin[i]`."""
        return begin[self.part] + self._within

    def sums(self) -> I64:
        """Return (parts,) the sum of each part."""
        # bincount sums in float64, which is exact up to 2^53 bytes.
        return np.bincount(self.part, self.values, len(self.count)).astype(np.int64)

    def picked(self, parts: npt.NDArray[np.intp]) -> Ragged:
        """Return the given parts in the given order."""
        count = self.count[parts]
        picked = Ragged(np.empty(int(count.sum()), self.values.dtype), count)
        return Ragged(self.values[picked.places(self.starts[parts])], count)

    def where(self, kept: npt.NDArray[np.bool_]) -> Ragged:
        """Return the values for which `kept` is True; parts may become empty."""
        return Ragged(self.values[kept], np.bincount(self.part[kept], minlength=len(self.count)))


def column(size: int, dtype: npt.DTypeLike, *parts: tuple[npt.NDArray[Any] | slice, Any]) -> npt.NDArray[Any]:
    """Return (size,) a column with the values of each part (positions, values), and zeros."""
    made = np.zeros(size, dtype)
    for places, values in parts:
        made[places] = values
    return made


@dataclass(frozen=True, eq=False)
class FsdpUnits:
    """FSDP units in forward order: parameters that are unsharded together, and the ops around their use.

    Columns are (units,). The root unit, with parameters outside of all blocks, is first: its forward starts
    first.
    """

    parameters: Ragged
    """Rows of `step.parameters`, in the order in which FSDP2 lays them out."""
    has_root: bool
    number: I64
    """0 for the root, 1 + the unit's place among all groups of blocks for others."""
    first_forward: I32
    """Op before which the unit is unsharded."""
    last_forward: I32
    """Op after which it is resharded."""
    first_backward: I32
    last_backward: I32
    """-1: the unit has no backward, as all its calls are without gradients."""

    def __len__(self) -> int:
        """Return the number of units."""
        return len(self.first_forward)


@functools.lru_cache(maxsize=8)
def units_of(step: Step, blocks_per_unit: int) -> FsdpUnits:
    """Return the FSDP units of `step`; blocks without parameters or a call have none."""
    n_blocks = len(step.blocks)
    n_units = 1 + -(-n_blocks // blocks_per_unit)  # unit 0 is the root, removed below if it is empty
    block = columns_of(step.parameters).block
    order = np.asarray(gathering_order(columns_of(step.parameters).names), np.int32)
    order = order[np.argsort(block[order], kind="stable")]
    count = np.bincount(_unit(block[order], blocks_per_unit), minlength=n_units)

    backward = np.flatnonzero(
        (step.ops.phase == Phase.BACKWARD) | (step.ops.phase == Phase.RECOMPUTE)
    ).astype(np.int32)
    first_backward, last_backward = _first_and_last(step, backward, n_units, blocks_per_unit)
    # Ops that an earlier pass inserted around a block's forward (D2H copies) run inside FSDP2's hooks.
    forward = np.flatnonzero(step.ops.phase == Phase.FORWARD).astype(np.int32)
    first_forward, last_forward = _first_and_last(step, forward, n_units, blocks_per_unit)
    starts = np.arange(0, n_blocks, blocks_per_unit)
    np.minimum(first_forward[1:], step.forward_starts[starts], out=first_forward[1:])
    np.maximum(
        last_forward[1:],
        step.forward_ends[np.minimum(starts + blocks_per_unit, n_blocks) - 1],
        out=last_forward[1:],
    )

    _place_idle(step, blocks_per_unit, first_forward, first_backward, last_backward)
    end = step.backward_end
    inside = backward[step.ops.module[backward] != 0]
    first_forward[0], last_forward[0] = step.forward_starts[n_blocks], step.forward_ends[n_blocks]
    # Reloads of the last block's saved tensors may come before the first backward op of a module.
    first_backward[0] = min(
        int(inside[0]) if len(inside) else int(end), int(first_backward[1:].min(initial=end))
    )
    last_backward[0] = end
    # FSDP2 unshards blocks under no_grad as well, such as those of a frozen reference model.
    in_forward = np.zeros(n_units, bool)
    in_forward[_unit(step.calls.block, blocks_per_unit)] = True
    in_forward[_unit(step.calls.block[step.calls.grad_enabled > 0], blocks_per_unit)] = False
    existing = np.flatnonzero((count > 0) & ((last_backward >= 0) | in_forward))
    parameters = Ragged(order, count).picked(existing)
    columns = (column[existing] for column in (first_forward, last_forward, first_backward, last_backward))
    return FsdpUnits(parameters, bool(count[0]), existing, *columns)


def _place_idle(step: Step, blocks_per_unit: int, forward: I32, first: I32, last: I32) -> None:
    """Set `first` and `last` of units that are called but compute nothing, which FSDP2 unshards too."""
    called = np.unique(_unit(step.calls.block[step.calls.grad_enabled > 0], blocks_per_unit))
    if (last[called] >= 0).all():
        return
    modules = step.ops.module.astype(np.int64) * (len(step.calls.block) + 1) + step.ops.call + 1
    backward, is_forward = step.ops.phase == Phase.BACKWARD, step.ops.phase == Phase.FORWARD
    for unit in called[last[called] < 0].tolist():
        before = np.arange(step.ops.n) < forward[unit]
        # Modules that ran before it and not after it, whose backward comes after its own.
        earlier = np.setdiff1d(modules[is_forward & before], modules[is_forward & ~before])
        behind = backward & np.isin(modules, earlier)
        if behind.any():
            first[unit] = np.argmax(behind)
            last[unit] = first[unit] - 1


def _unit(block: I32, blocks_per_unit: int) -> I32:
    unit: I32 = np.where(block < 0, 0, 1 + block // blocks_per_unit)
    return unit


def _first_and_last(step: Step, ops: I32, n_units: int, blocks_per_unit: int) -> tuple[I32, I32]:
    """Return (units,) the first and last of `ops` in each unit's blocks; n_ops and -1 if there are none."""
    unit = _unit(step.ops.block[ops], blocks_per_unit)
    first, last = np.full(n_units, step.ops.n, np.int32), np.full(n_units, -1, np.int32)
    first[unit[::-1]] = ops[::-1]  # reversed, so each unit's first op is assigned last
    last[unit] = ops
    return first, last


@functools.lru_cache(maxsize=16)
def gathering_order(names: tuple[str, ...]) -> list[int]:
    """Return rows of `names` in FSDP2's post-order: a module's own parameters after its children's."""
    tree: dict[str, Any] = {}
    for index, name in enumerate(names):
        *modules, own = name.split(".")
        node = tree
        for module in modules:
            node = node.setdefault(module + ".", {})
        node[own] = index

    def visit(node: dict[str, Any]) -> list[int]:
        # Children first: FSDP2 is applied bottom-up, and a unit takes what its children left.
        children = [row for name, child in node.items() if name[-1:] == "." for row in visit(child)]
        return children + [row for name, row in node.items() if name[-1:] != "."]

    return visit(tree)


# -- all-gathers and reduced gradients of blocks that FSDP2 shards -------------------------------------------

# Under offload only a rank's rows are offloaded (`offload.core.fsdp_shards`). The all-gather reads them: in
# forward when their block begins, in backward while the block after it computes, as FSDP2 prefetches one unit
# there.
_GATHER, _COPY = "memtune.all_gather_into_.default", "fsdp.split_with_sizes_copy.default"


@dataclass(frozen=True, eq=False)
class Gathers:
    """All-gathers of the blocks, one op per block and pass."""

    forward: I32
    """(blocks,) the all-gather of forward."""
    backward: I32
    """(blocks,) the all-gather of backward."""
    begins: I32
    """(2 · blocks,) the first op of FSDP2 for each block, forward and backward."""
    copies: I32
    """(2 · blocks,) op that copies a block's parameters from the gather buffer, forward and backward."""

    @property
    def of_moments(self) -> I32:
        """(2 · blocks,) the all-gather that reads rows in each moment of `residency.order_of_use`."""
        # The last moment reads no rows: its entry repeats the first gather of backward.
        return np.concatenate([self.forward, self.backward[-2::-1], self.backward[:1]])


@memoized
def gathers_of(step: Step) -> Gathers | None:
    """Return the all-gathers of `step`; None if blocks are not gathered one by one in each pass."""
    if _GATHER not in step.names or _COPY not in step.names:
        return None
    n_blocks, block = len(step.blocks), _blocks(step)
    gather, copy = (_rows(step, name) for name in (_GATHER, _COPY))
    count = np.bincount(block[block >= 0], minlength=n_blocks)
    has_root = int((block < 0).any())
    is_forward = [step.ops.phase[rows] == Phase.FORWARD for rows in (gather, copy)]
    forward, backward = gather[is_forward[0]], gather[~is_forward[0]]
    again = copy[~is_forward[1]]
    if (
        not count.all()
        or len(forward) != n_blocks + has_root
        or not n_blocks <= len(backward) == len(again) <= n_blocks + has_root
    ):
        return None
    forward, backward, again = forward[-n_blocks:], backward[-n_blocks:][::-1], again[-n_blocks:]
    copies = np.concatenate([copy[is_forward[1]][-n_blocks:], again]).astype(np.int32)
    # A buffer stands before each gather, a parameter's memory each before what copies it out.
    begins = np.concatenate([forward - 1, again - count[::-1]]).astype(np.int32)
    return Gathers(forward, backward, begins, copies)


def members_of_units(step: Step) -> list[I32]:
    """Return the parameters of each block in the order in which FSDP2 has them in a buffer."""
    block, order = _blocks(step), np.asarray(gathering_order(columns_of(step.parameters).names), np.int32)
    order = order[np.argsort(block[order], kind="stable")]
    count = np.bincount(block[block >= 0], minlength=len(step.blocks))
    return np.split(order[len(order) - int(count.sum()) :], np.cumsum(count)[:-1])


def _blocks(step: Step) -> I32:
    """Return (parameters,) block of each, -1 for none, including parameters that are not offloaded."""
    columns = columns_of(step.parameters)
    found: I32 = np.where(columns.block >= 0, columns.block, _by_name(columns.names, step.blocks)).astype(
        np.int32
    )
    return found


@functools.lru_cache(maxsize=8)
def _by_name(names: tuple[str, ...], blocks: tuple[str, ...]) -> I32:
    of = {name: index for index, name in enumerate(blocks)}
    found = []
    for name in names:
        path = name.split(".")
        prefixes = (".".join(path[:end]) for end in range(1, len(path)))
        found.append(next((of[each] for each in prefixes if each in of), -1))
    return np.asarray(found, np.int32)


def _rows(step: Step, name: str) -> I32:
    inside = step.ops.phase < Phase.BOUNDARY
    return np.flatnonzero(inside & (step.ops.name == step.names.index(name))).astype(np.int32)


@dataclass(frozen=True, eq=False)
class RowsOfGradients:
    """Reduced gradients of the blocks' parameters, in the order in which FSDP2 sets them."""

    parameter: I32
    raw: I32
    """The storage that holds this micro-batch's rows of all gradients of its block."""
    sums: I32
    """The sum that the rows are added to; -1 in the only or first micro-batch."""
    after: I32
    """The op that sets or adds the gradient."""
    n_bytes: I64

    def where(self, kept: npt.NDArray[np.bool_]) -> RowsOfGradients:
        """Return the entries where `kept` is true."""
        return RowsOfGradients(
            self.parameter[kept], self.raw[kept], self.sums[kept], self.after[kept], self.n_bytes[kept]
        )


def rows_of_gradients(step: Step) -> RowsOfGradients:
    """Return the rows of gradients of `step`, whose gradients FSDP2 reduces."""
    columns, block = columns_of(step.parameters), _blocks(step)
    rank = np.empty(len(columns.block), np.int32)
    rank[np.asarray(gathering_order(columns.names), np.int32)] = np.arange(len(rank), dtype=np.int32)
    selected = np.flatnonzero((block >= 0) & (columns.gradient >= 0)).astype(np.int32)
    selected = selected[np.lexsort((rank[selected], -block[selected]))]  # the last block first
    gradient = columns.gradient[selected]
    writes = np.flatnonzero((step.uses.mode == WRITES) & (step.use_phase < Phase.BOUNDARY))
    writer = np.full(step.storages.n, -1, np.int32)
    writer[step.uses.storage[writes]] = step.uses.op[writes]
    summed = step.storages.producer[gradient] < 0
    raw, after = gradient.copy(), writer[gradient].copy()
    if summed.any():  # each parameter of a block has an addition of its own, in FSDP2's order
        adds = writes[np.isin(step.uses.storage[writes], gradient[summed])]
        order = np.argsort(step.uses.op[adds], kind="stable")
        after[summed] = step.uses.op[adds][order]
        read = np.full(step.ops.n, -1, np.int32)
        others = ~np.isin(step.uses.storage, gradient[summed])
        read[step.uses.op[others]] = step.uses.storage[others]
        raw[summed] = read[after[summed]]
    n_bytes = columns.n_bytes[selected]
    found = RowsOfGradients(selected, raw, np.where(summed, gradient, -1).astype(np.int32), after, n_bytes)
    return found.where(columns.block[selected] >= 0)
