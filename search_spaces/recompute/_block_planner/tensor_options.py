"""Undominated combinations of actions on the tensors that a block's backward needs.

There is one decision per tensor. Keeping it costs its bytes. Offloading it costs seconds and no bytes.
Recomputing it costs the seconds of its op and of all ops before it, up to tensors that are kept, offloaded or
inputs; such chains are shared. With decisions as bits, combinations are priced together, one column each,
walking the ops from the last to the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from memtune.program import F64, I64

BITS = 12
"""Largest number of tensors for which every combination is priced."""
_WIDTH = 32
"""Combinations that are varied further in each round, if there are more tensors."""
_ROUNDS = 3
_CELLS = 40_000_000
"""Largest number of ops times combinations in a round: about a second, and 80 MB."""

Mask = npt.NDArray[np.bool_]


class Action(StrEnum):
    """State of a tensor between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    HOST = "host"
    SSD = "ssd"
    SPLIT = "split"


OffloadActions = list[Action | None]
"""Action by op that frees its outputs; None: they are kept."""

OFFLOAD_ACTIONS = (Action.HOST, Action.SSD, Action.SPLIT)
"""Actions that free a tensor's bytes without recomputation; without a mechanism their time is infinite."""


@dataclass(frozen=True)
class BlockOp:
    """One op of a block's forward, with the costs of having its outputs in backward."""

    name: str
    seconds: float
    """Seconds to run the op."""
    reads: tuple[int, ...] = ()
    """Ops of the block, by number, whose outputs it needs; all smaller than its own number."""
    bytes: int = 0
    """Bytes that keeping its outputs would hold."""
    saved: bool = False
    """Backward needs an output."""
    keepable: bool = False
    """The outputs may be kept: no op writes into them later, and they are saved or expensive to recompute."""
    offload_s: Mapping[Action, float] = field(default_factory=dict)
    """Seconds that each offload action adds to the step; a missing action costs infinite time."""
    is_input: bool = False
    """A pseudo-op for the block's inputs: they can be kept or offloaded but not recomputed."""


@dataclass(frozen=True)
class Combination:
    """One decision for every op of a block, with its bytes and seconds."""

    actions: tuple[Action | None, ...]
    """Action by op; None for outputs that are neither needed nor recomputed."""
    held_bytes: int
    seconds: float

    @property
    def again(self) -> frozenset[int]:
        """Ops that run a second time."""
        return frozenset(i for i, action in enumerate(self.actions) if action is Action.RECOMPUTE)

    @property
    def moved(self) -> frozenset[int]:
        """Ops whose outputs are offloaded to the host."""
        return frozenset(i for i, action in enumerate(self.actions) if action is Action.HOST)


@dataclass(frozen=True, eq=False)
class _Priced:
    need: Mask  # (ops, combinations) True where backward or a recomputed op needs the op's outputs
    retained: Mask  # (ops, combinations) True where the outputs are kept or offloaded
    held_bytes: I64
    seconds: F64


def combinations(
    ops: tuple[BlockOp, ...], limit: int, known: Sequence[frozenset[int]] = ()
) -> list[Combination]:
    """Return at most `limit` undominated combinations, bytes descending."""
    # With at most `BITS` tensors to decide on, all combinations are priced. With more, the search
    # starts from decisions for groups of alike tensors (same op, same size) and from the sets in
    # `known` of ops to keep, and tries every change of one or two tensors on the undominated ones. In a
    # block of hundreds of tensors (an LSTM, a scan) runs of alike tensors change together.
    undecided = _undecided(ops)
    few = _keeping(undecided, known)
    resident: OffloadActions = [None] * len(ops)
    offload, found = _cheapest_offload(ops), []
    for moving in (resident, offload) if any(offload) else (resident,):
        priced = _explored(ops, undecided, np.concatenate([_start(ops, undecided), few], axis=1), moving)
        found += [_combination(ops, priced, int(row), moving) for row in _best(priced, limit)]
    held = np.asarray([each.held_bytes for each in found])
    seconds = np.asarray([each.seconds for each in found])
    rows = _undominated(held, seconds)
    chosen = [found[i] for i in rows[_thinned(held[rows], seconds[rows], limit)]]
    return sorted(chosen, key=lambda each: (-each.held_bytes, each.seconds))


def keep_only(ops: tuple[BlockOp, ...], kept: frozenset[int]) -> Combination:
    """Return the combination that keeps `kept`, if possible, and recomputes all else backward needs."""
    undecided = _undecided(ops)
    resident: OffloadActions = [None] * len(ops)
    return _combination(ops, price(ops, undecided, _keeping(undecided, [kept]), resident), 0, resident)


def _undecided(ops: tuple[BlockOp, ...]) -> list[int]:
    return [i for i, op in enumerate(ops) if op.keepable and op.bytes and not op.is_input]


def _keeping(undecided: list[int], known: Sequence[frozenset[int]]) -> Mask:
    return (
        np.asarray([[i in kept for i in undecided] for kept in known], bool)
        .reshape(len(known), len(undecided))
        .T
    )


def _start(ops: tuple[BlockOp, ...], undecided: list[int]) -> Mask:
    """Return the (undecided, combinations) masks to start from: all, or of groups of alike tensors."""
    # Too many tensors to try all subsets: those of one op and size are decided together, and the smallest of
    # them with one bit.
    keys: dict[object, int] = {}
    for i in sorted(undecided, key=lambda i: -ops[i].bytes):
        keys.setdefault(i if len(undecided) <= BITS else (ops[i].name, ops[i].bytes), len(keys))
    bit = [
        min(keys[i if len(undecided) <= BITS else (ops[i].name, ops[i].bytes)], BITS - 1) for i in undecided
    ]
    bits = np.arange(1 << min(len(keys), BITS), dtype=np.int32)
    return (
        np.stack([(bits >> each) & 1 for each in bit]).astype(bool) if undecided else np.zeros((0, 1), bool)
    )


def _explored(
    ops: tuple[BlockOp, ...], undecided: list[int], start: Mask, offload: OffloadActions
) -> _Priced:
    """Return the undominated of all combinations reached from `start` by up to two changes at a time."""
    priced = price(ops, undecided, start, offload)
    if len(undecided) <= BITS:
        return priced
    one = _changed_together(ops, undecided)
    changes = np.concatenate(
        [one, *(one[:, i : i + 1] ^ one[:, i + 1 :] for i in range(one.shape[1]))], axis=1
    )
    for _ in range(_ROUNDS):
        # Only undominated combinations are changed further, which bounds the number tried in each round.
        best = _best(priced, _WIDTH)
        now = priced.retained[undecided][:, best]
        tried = (now[:, :, None] ^ changes[:, None, :]).reshape(len(undecided), -1)
        priced = price(ops, undecided, np.concatenate([now, tried], axis=1), offload)
    return priced


def _changed_together(ops: tuple[BlockOp, ...], undecided: list[int]) -> Mask:
    """Return the (undecided, units) masks of the tensors that change together."""
    # Each tensor alone, or, where pairs of these would exceed `_CELLS`, runs of alike ones in the order of
    # the program: of a recurrence, some time steps.
    count = len(undecided)
    units = math.isqrt(2 * _CELLS // (_WIDTH * len(ops)))
    if count <= units:
        return np.eye(count, dtype=bool)
    alike: dict[tuple[str, int], list[int]] = {}
    for row, i in enumerate(undecided):
        alike.setdefault((ops[i].name, ops[i].bytes), []).append(row)
    # More kinds of tensors than units: runs then ignore kinds and follow the program's order alone.
    if len(alike) > units:
        alike = {("", 0): list(range(count))}
    runs = [
        run
        for rows in alike.values()
        for run in np.array_split(rows, max(1, min(len(rows), units * len(rows) // count)))
    ]
    found = np.zeros((count, len(runs)), bool)
    for unit, run in enumerate(runs):
        found[run, unit] = True
    return found


def _best(priced: _Priced, limit: int) -> npt.NDArray[np.intp]:
    rows = _undominated(priced.held_bytes, priced.seconds)
    return rows[_thinned(priced.held_bytes[rows], priced.seconds[rows], limit)]


def price(ops: tuple[BlockOp, ...], undecided: list[int], retained: Mask, offload: OffloadActions) -> _Priced:
    """Return bytes and seconds of many combinations.

    Args:
        ops: The block's forward.
        undecided: Ops to decide on; all others run again where they are needed.
        retained: (undecided, combinations) True where an op's outputs are kept or offloaded.
        offload: By op, the offload action of retained outputs; None keeps them on the device.
    """
    place = {op: row for row, op in enumerate(undecided)}
    count = retained.shape[1]
    need = np.zeros((len(ops), count), bool)
    resident = np.zeros((len(ops), count), bool)
    held, seconds = np.zeros(count, np.int64), np.zeros(count)
    # From the last op to the first, so that all readers of an op have set its `need` before it is priced.
    for i in range(len(ops) - 1, -1, -1):
        op, needed = ops[i], need[i]
        if op.is_input:
            resident[i] = True
        elif i in place:
            resident[i] = retained[place[i]]
        if op.saved:
            # In place: `needed` is the row of `need`, which the readers before it in the loop have set.
            needed |= True
        run = needed & ~resident[i]
        for source in op.reads:
            need[source] |= run
        seconds += op.seconds * run
        action = offload[i]
        if action is None:
            held += op.bytes * (needed & resident[i])
        else:
            seconds += op.offload_s[action] * (needed & resident[i])
    return _Priced(need, resident, held, seconds)


def _cheapest_offload(ops: tuple[BlockOp, ...]) -> OffloadActions:
    def cheapest(op: BlockOp) -> Action | None:
        known = {action: op.offload_s.get(action, np.inf) for action in OFFLOAD_ACTIONS}
        best = min(known, key=lambda action: known[action])
        return best if op.keepable and np.isfinite(known[best]) else None

    return [cheapest(op) for op in ops]


def _undominated(held: I64, seconds: F64) -> npt.NDArray[np.intp]:
    """Return the rows that no other row beats in both, bytes descending."""
    order = np.lexsort((seconds, held))
    best = np.minimum.accumulate(seconds[order])
    better = np.append(True, best[1:] < best[:-1] * (1 - 1e-12))
    found: npt.NDArray[np.intp] = order[better][::-1]
    return found


def _thinned(held: I64, seconds: F64, limit: int) -> npt.NDArray[np.intp]:
    """Return at most `limit` rows: the ends, then each time the row farthest below its neighbours' line."""
    if len(held) <= limit:
        return np.arange(len(held))
    x = (held - held[-1]) / max(int(held[0] - held[-1]), 1)
    y = (seconds - seconds[0]) / max(float(seconds[-1] - seconds[0]), 1e-30)
    chosen = [0, len(held) - 1]
    while len(chosen) < limit:
        at = np.sort(chosen)
        gain = np.interp(-x, -x[at], y[at]) - y
        # Once the convex hull is complete, take the row in the widest gap in bytes.
        nearest = np.abs(x[:, None] - x[at]).min(1)
        nearest[at], gain[at] = -1.0, -1.0
        chosen.append(int(gain.argmax()) if gain.max() > 1e-3 else int(nearest.argmax()))
    return np.sort(np.asarray(chosen))


def _combination(ops: tuple[BlockOp, ...], priced: _Priced, row: int, offload: OffloadActions) -> Combination:
    def action(i: int) -> Action | None:
        if not priced.need[i, row]:
            return None
        return (offload[i] or Action.KEEP) if priced.retained[i, row] else Action.RECOMPUTE

    return Combination(
        tuple(map(action, range(len(ops)))), int(priced.held_bytes[row]), float(priced.seconds[row])
    )
