"""FSDP2's all-gathers and reduced gradients of each block, as rows of a Step (`offload.core.fsdp_shards`).

Under FSDP2 only a rank's rows are offloaded. The all-gather reads them: in forward when their block begins,
in backward while the block after it computes, because FSDP2 prefetches one unit there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.program import I32, I64, Phase, Step, columns_of, gathering_order, memoized

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
    """(2 · blocks,) the op that copies a block's parameters out of the all-gather buffer, forward and
    backward.
    """

    @property
    def of_moments(self) -> I32:
        """(2 · blocks,) the all-gather that reads rows in each moment of `residency.order_of_use`.

        The last moment reads no rows; its entry repeats the first gather of backward.
        """
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
    """(parameters,) the block of each parameter, -1 for none, including parameters that are not offloaded."""
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
    mine = np.flatnonzero((block >= 0) & (columns.gradient >= 0)).astype(np.int32)
    mine = mine[np.lexsort((rank[mine], -block[mine]))]  # the last block first
    gradient = columns.gradient[mine]
    writes = np.flatnonzero((step.uses.mode == 1) & (step.use_phase < Phase.BOUNDARY))
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
    n_bytes = (columns.numel * columns.itemsize)[mine]
    found = RowsOfGradients(mine, raw, np.where(summed, gradient, -1).astype(np.int32), after, n_bytes)
    return found.where(columns.block[mine] >= 0)
