"""What a block may do with each tensor that its backward needs: all combinations of actions that no other beats.

One decision per tensor. To keep it costs its bytes. To move it costs seconds and no bytes. To run it again costs the seconds
of its op and of all ops before it up to what is kept, moved or given to the block; such chains are shared. With the decisions
as bits, all combinations are priced at once: one column each, walking the ops from the last to the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from memtune.program import F64, I64

BITS = 14
"""Tensors (or groups of alike ones) of a block that are decided each by itself; smaller ones follow (`price`)."""

Mask = npt.NDArray[np.bool_]


class Action(StrEnum):
    """What happens to a tensor between forward and backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    HOST = "host"
    SSD = "ssd"
    SPLIT = "split"


AWAY = (Action.HOST, Action.SSD, Action.SPLIT)
"""Actions that free a tensor's bytes without running anything again; what has no mechanism is priced infinite."""


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


def combinations(ops: tuple[Made, ...], limit: int, known: Sequence[frozenset[int]] = ()) -> list[Combination]:
    """At most `limit` undominated combinations, bytes descending, and those that keep just the ops of each of `known`."""
    free = _free(ops)
    bits = np.arange(1 << len(free), dtype=np.int32)
    stays = np.stack([(bits >> i) & 1 for i in range(len(free))]).astype(bool) if free else np.zeros((0, 1), bool)
    away = _cheapest_away(ops)
    found: list[Combination] = []
    for moving in ([None] * len(ops), away) if any(away) else ([None] * len(ops),):
        priced = price(ops, free, stays, moving)
        rows = _undominated(priced.held_bytes, priced.seconds)
        rows = rows[_thinned(priced.held_bytes[rows], priced.seconds[rows], limit)]
        found += [_combination(ops, priced, int(row), moving) for row in rows]
    rows = _undominated(np.asarray([each.held_bytes for each in found]), np.asarray([each.seconds for each in found]))
    rows = rows[_thinned(np.asarray([found[i].held_bytes for i in rows]), np.asarray([found[i].seconds for i in rows]), limit)]
    chosen = [found[i] for i in rows]
    if free and known:
        few = np.stack([[any(i in kept for i in members) for members in free] for kept in known], 1)
        priced = price(ops, free, few, [None] * len(ops))
        chosen += [_combination(ops, priced, row, [None] * len(ops)) for row in range(len(known))]
    return sorted(chosen, key=lambda each: (-each.held_bytes, each.seconds))


def price(ops: tuple[Made, ...], free: list[list[int]], stays: Mask, away: list[Action | None] | list[None]) -> _Priced:
    """Bytes and seconds of many combinations.

    Args:
        ops: The block's forward.
        free: Groups of ops that are decided together; what is saved by any other op is kept unless its op runs again anyway.
        stays: (groups, combinations) True where a group is not run again.
        away: By op, how what stays leaves the device; None keeps it.
    """
    group = {op: row for row, members in enumerate(free) for op in members}
    count = stays.shape[1]
    need = np.zeros((len(ops), count), bool)
    stay = np.zeros((len(ops), count), bool)
    held, seconds = np.zeros(count, np.int64), np.zeros(count)
    for i in range(len(ops) - 1, -1, -1):
        op, needed = ops[i], need[i]
        if op.given:
            stay[i] = True
        elif i in group:
            stay[i] = stays[group[i]]
        elif op.saved and op.keepable:
            stay[i] = ~needed
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


def _free(ops: tuple[Made, ...]) -> list[list[int]]:
    """Groups of ops to decide on, largest first: each op by itself, or all of one name and size where they are many."""
    mine = [i for i, op in enumerate(ops) if op.keepable and op.bytes and not op.given]
    groups: dict[object, list[int]] = {}
    for i in mine:
        groups.setdefault(i if len(mine) <= BITS else (ops[i].name, ops[i].bytes), []).append(i)
    return sorted(groups.values(), key=lambda members: -sum(ops[i].bytes for i in members))[:BITS]


def _cheapest_away(ops: tuple[Made, ...]) -> list[Action | None]:
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
    """At most `limit` rows: the ends, and again and again the row that lies deepest below the line between its neighbours."""
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


def _combination(ops: tuple[Made, ...], priced: _Priced, row: int, away: list[Action | None] | list[None]) -> Combination:
    def action(i: int) -> Action | None:
        if not priced.need[i, row]:
            return None
        return (away[i] or Action.KEEP) if priced.stays[i, row] else Action.RECOMPUTE

    return Combination(tuple(map(action, range(len(ops)))), int(priced.held_bytes[row]), float(priced.seconds[row]))
