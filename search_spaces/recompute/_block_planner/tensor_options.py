"""What a block may do with each tensor that its backward needs: all combinations of actions that no other
beats.

One decision per tensor. To keep it costs its bytes. To move it costs seconds and no bytes. To run it again
costs the seconds of its op and of all ops before it up to what is kept, moved or given to the block; such
chains are shared. With the decisions as bits, combinations are priced together: one column each, walking the
ops from the last to the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from memtune.program import F64, I64

BITS = 12
"""Tensors of a block up to which every combination is priced."""
_WIDTH = 32
"""Combinations that are changed further where there are more tensors, and how often."""
_ROUNDS = 3

Mask = npt.NDArray[np.bool_]


class Action(StrEnum):
    """What happens to a tensor between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    HOST = "host"
    SSD = "ssd"
    SPLIT = "split"


Away = list[Action | None]
"""By op, how it leaves the device; None: it does not."""

AWAY = (Action.HOST, Action.SSD, Action.SPLIT)
"""Actions that free a tensor's bytes without running anything again; what has no mechanism is priced
infinite.
"""


@dataclass(frozen=True)
class Made:
    """What one op of a block's forward makes, and what it takes to have it in backward."""

    name: str
    seconds: float
    """To run the op."""
    reads: tuple[int, ...] = ()
    """Ops of the block, by number, whose outputs it needs; all smaller than its own."""
    bytes: int = 0
    """That would be held if its outputs were kept."""
    saved: bool = False
    """Backward needs an output."""
    keepable: bool = False
    """It may be kept: nothing writes into it later, and it is saved or dear to make."""
    away_s: Mapping[Action, float] = field(default_factory=dict)
    """Seconds on top of the step if it is moved or split; what is missing is infinite."""
    given: bool = False
    """Nothing makes it: the block is called with it, so it can be kept or moved but not run again."""


@dataclass(frozen=True)
class Combination:
    """One decision for every op of a block, what is held then and what it costs."""

    actions: tuple[Action | None, ...]
    """By op; None for what is neither needed nor run again."""
    held_bytes: int
    seconds: float

    @property
    def again(self) -> frozenset[int]:
        """Ops that run a second time."""
        return frozenset(i for i, action in enumerate(self.actions) if action is Action.RECOMPUTE)

    @property
    def moved(self) -> frozenset[int]:
        """Ops whose outputs go to the host."""
        return frozenset(i for i, action in enumerate(self.actions) if action is Action.HOST)


@dataclass(frozen=True, eq=False)
class _Priced:
    need: Mask  # (ops, combinations) backward or something that runs again needs the op's outputs
    stays: Mask  # (ops, combinations) it is kept, or moved where that is asked
    held_bytes: I64
    seconds: F64


def combinations(
    ops: tuple[Made, ...], limit: int, known: Sequence[frozenset[int]] = ()
) -> list[Combination]:
    """At most `limit` undominated combinations, bytes descending.

    All combinations are priced where there are at most `BITS` tensors to decide on. Where there are more,
    those of alike tensors (same op, same size) together come first, with those that keep just the ops of each
    of `known`, and every change of one or two tensors is tried on what is undominated.
    """
    free = _free(ops)
    few = _keeping(free, known)
    stay: Away = [None] * len(ops)
    away, found = _cheapest_away(ops), []
    for moving in (stay, away) if any(away) else (stay,):
        priced = _found(ops, free, np.concatenate([_start(ops, free), few], axis=1), moving)
        found += [_combination(ops, priced, int(row), moving) for row in _best(priced, limit)]
    held, seconds = (
        np.asarray([each.held_bytes for each in found]),
        np.asarray([each.seconds for each in found]),
    )
    rows = _undominated(held, seconds)
    chosen = [found[i] for i in rows[_thinned(held[rows], seconds[rows], limit)]]
    return sorted(chosen, key=lambda each: (-each.held_bytes, each.seconds))


def keeping(ops: tuple[Made, ...], kept: frozenset[int]) -> Combination:
    """The combination that keeps `kept`, as far as they may be kept, and runs all else again that backward
    needs.
    """
    free = _free(ops)
    stay: Away = [None] * len(ops)
    return _combination(ops, price(ops, free, _keeping(free, [kept]), stay), 0, stay)


def _free(ops: tuple[Made, ...]) -> list[int]:
    return [i for i, op in enumerate(ops) if op.keepable and op.bytes and not op.given]


def _keeping(free: list[int], known: Sequence[frozenset[int]]) -> Mask:
    return np.asarray([[i in kept for i in free] for kept in known], bool).reshape(len(known), len(free)).T


def _start(ops: tuple[Made, ...], free: list[int]) -> Mask:
    """(free, combinations) all of them, or all of groups of alike ones, the largest groups each by itself."""
    keys: dict[object, int] = {}
    for i in sorted(free, key=lambda i: -ops[i].bytes):
        keys.setdefault(i if len(free) <= BITS else (ops[i].name, ops[i].bytes), len(keys))
    bit = [min(keys[i if len(free) <= BITS else (ops[i].name, ops[i].bytes)], BITS - 1) for i in free]
    bits = np.arange(1 << min(len(keys), BITS), dtype=np.int32)
    return np.stack([(bits >> each) & 1 for each in bit]).astype(bool) if free else np.zeros((0, 1), bool)


def _found(ops: tuple[Made, ...], free: list[int], start: Mask, away: Away) -> _Priced:
    """The undominated ones of `start` and of all that one or two changes at a time lead to, `_ROUNDS`
    times.
    """
    priced = price(ops, free, start, away)
    if len(free) <= BITS:
        return priced
    one = np.eye(len(free), dtype=bool)
    changes = np.concatenate([one, *(one[:, i : i + 1] ^ one[:, i + 1 :] for i in range(len(free)))], axis=1)
    for _ in range(_ROUNDS):
        best = _best(priced, _WIDTH)
        now = priced.stays[free][:, best]
        tried = (now[:, :, None] ^ changes[:, None, :]).reshape(len(free), -1)
        priced = price(ops, free, np.concatenate([now, tried], axis=1), away)
    return priced


def _best(priced: _Priced, limit: int) -> npt.NDArray[np.intp]:
    rows = _undominated(priced.held_bytes, priced.seconds)
    return rows[_thinned(priced.held_bytes[rows], priced.seconds[rows], limit)]


def price(ops: tuple[Made, ...], free: list[int], stays: Mask, away: Away) -> _Priced:
    """Bytes and seconds of many combinations.

    Args:
        ops: The block's forward.
        free: Ops that are decided; all others run again where they are needed.
        stays: (free, combinations) True where an op's outputs stay.
        away: By op, how what stays leaves the device; None keeps it.
    """
    place = {op: row for row, op in enumerate(free)}
    count = stays.shape[1]
    need = np.zeros((len(ops), count), bool)
    stay = np.zeros((len(ops), count), bool)
    held, seconds = np.zeros(count, np.int64), np.zeros(count)
    for i in range(len(ops) - 1, -1, -1):
        op, needed = ops[i], need[i]
        if op.given:
            stay[i] = True
        elif i in place:
            stay[i] = stays[place[i]]
        if op.saved:
            needed |= True
        run = needed & ~stay[i]
        for source in op.reads:
            need[source] |= run
        seconds += op.seconds * run
        action = away[i]
        if action is None:
            held += op.bytes * (needed & stay[i])
        else:
            seconds += op.away_s[action] * (needed & stay[i])
    return _Priced(need, stay, held, seconds)


def _cheapest_away(ops: tuple[Made, ...]) -> Away:
    def cheapest(op: Made) -> Action | None:
        known = {action: op.away_s.get(action, np.inf) for action in AWAY}
        best = min(known, key=lambda action: known[action])
        return best if op.keepable and np.isfinite(known[best]) else None

    return [cheapest(op) for op in ops]


def _undominated(held: I64, seconds: F64) -> npt.NDArray[np.intp]:
    """Rows that no other row beats in both, bytes descending."""
    order = np.lexsort((seconds, held))
    best = np.minimum.accumulate(seconds[order])
    better = np.append(True, best[1:] < best[:-1] * (1 - 1e-12))
    found: npt.NDArray[np.intp] = order[better][::-1]
    return found


def _thinned(held: I64, seconds: F64, limit: int) -> npt.NDArray[np.intp]:
    """At most `limit` rows: the ends, and again and again the row that lies deepest below the line between
    its neighbours.
    """
    if len(held) <= limit:
        return np.arange(len(held))
    x = (held - held[-1]) / max(int(held[0] - held[-1]), 1)
    y = (seconds - seconds[0]) / max(float(seconds[-1] - seconds[0]), 1e-30)
    chosen = [0, len(held) - 1]
    while len(chosen) < limit:
        at = np.sort(chosen)
        gain = np.interp(-x, -x[at], y[at]) - y
        # Past the convex hull, what leaves the widest gap in bytes comes next.
        nearest = np.abs(x[:, None] - x[at]).min(1)
        nearest[at], gain[at] = -1.0, -1.0
        chosen.append(int(gain.argmax()) if gain.max() > 1e-3 else int(nearest.argmax()))
    return np.sort(np.asarray(chosen))


def _combination(ops: tuple[Made, ...], priced: _Priced, row: int, away: Away) -> Combination:
    def action(i: int) -> Action | None:
        if not priced.need[i, row]:
            return None
        return (away[i] or Action.KEEP) if priced.stays[i, row] else Action.RECOMPUTE

    return Combination(
        tuple(map(action, range(len(ops)))), int(priced.held_bytes[row]), float(priced.seconds[row])
    )
