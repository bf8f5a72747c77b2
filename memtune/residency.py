"""Which units are on the device when: planned once from the order in which they are used, followed by mechanism and pass.

A step has a *moment* for each use of a unit: forward of the first to the last one, backward of the last to the first one. When a
moment begins, some units are let go, then some are brought in. After the last moment none is on the device, since the weights
change.

Two families of rules. A *window* slides over the units: those that are used next come in ahead of their use, at a price of the
slots they take. A *cache* brings a unit in when it is used and lets one go when it must: the one used longest ago (LRU), the one
used least often lately (LFU, what is long ago counts less), or the one that is used again last of all (Belady 1966, "A study of
replacement algorithms for a virtual-storage computer", which no other rule beats in moves).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Rule = Literal["belady", "lru", "lfu"]
Units = tuple[int, ...]
_DECAY = 0.9
"""By which a count of uses is multiplied in every moment."""


@dataclass(frozen=True)
class Residency:
    """What happens when each moment begins; the last entry is the end of backward."""

    drops: tuple[Units, ...]
    """Units that are let go."""
    loads: tuple[Units, ...]
    """Units that come in then, the one that is used first."""

    @property
    def moves(self) -> int:
        """Times that a unit comes in."""
        return sum(map(len, self.loads))

    def resident(self) -> list[frozenset[int]]:
        """Units on the device in each moment."""
        found: list[frozenset[int]] = []
        now: frozenset[int] = frozenset()
        for drops, loads in zip(self.drops, self.loads, strict=True):
            now = now - frozenset(drops) | frozenset(loads)
            found.append(now)
        return found


def order_of_use(units: int) -> Units:
    """The unit of each moment of a step over `units` units."""
    return (*range(units), *reversed(range(units)))


@functools.lru_cache(maxsize=64)
def window(units: int, slots: int) -> Residency:
    """`slots` consecutive units slide over the model and back, each there `slots` - 1 moments before its use.

    Raises:
        ValueError: `slots` is not between 1 and `units`.
    """
    if not 1 <= slots <= units:
        raise ValueError(f"a window over {units} units has 1 to {units} slots, not {slots}")
    firsts = [min(unit, units - slots) for unit in range(units)]
    firsts += [max(unit - slots + 1, 0) for unit in reversed(range(units))]
    wanted = [frozenset(range(first, first + slots)) for first in firsts]
    uses = order_of_use(units)
    ahead = [lambda unit: unit] * units + [lambda unit: -unit] * units
    loads = [
        tuple(sorted(now - before, key=key)) for now, before, key in zip(wanted, [frozenset(), *wanted], ahead, strict=False)
    ]
    drops = [tuple(sorted(before - now)) for now, before in zip(wanted, [frozenset(), *wanted], strict=False)]
    assert all(use in now for use, now in zip(uses, wanted, strict=True))
    return Residency((*drops, tuple(sorted(wanted[-1]))), (*loads, ()))


@functools.lru_cache(maxsize=64)
def cached(uses: Units, slots: int, rule: Rule) -> Residency:
    """`slots` slots for the units of `uses`, each brought in when it is used and not there.

    Args:
        uses: The unit of each moment, as recorded.
        slots: Units that may be on the device at once, at least 1.
        rule: Which one goes when there is no slot left.
    """
    now: set[int] = set()
    drops: list[Units] = []
    loads: list[Units] = []
    for moment, unit in enumerate(uses):
        gone: Units = ()
        if unit not in now and len(now) == slots:
            gone = (_leaves(now, uses, moment, rule),)
            now.discard(gone[0])
        drops.append(gone)
        loads.append(() if unit in now else (unit,))
        now.add(unit)
    return Residency((*drops, tuple(sorted(now))), (*loads, ()))


def _leaves(now: set[int], uses: Units, moment: int, rule: Rule) -> int:
    if rule == "belady":
        return max(sorted(now), key=lambda unit: _next_use(uses, moment, unit))
    if rule == "lru":
        return min(sorted(now), key=lambda unit: _last_use(uses, moment, unit))
    return min(sorted(now), key=lambda unit: (_frequency(uses, moment, unit), _last_use(uses, moment, unit)))


def _next_use(uses: Sequence[int], moment: int, unit: int) -> int:
    return next((at for at in range(moment, len(uses)) if uses[at] == unit), len(uses))


def _last_use(uses: Sequence[int], moment: int, unit: int) -> int:
    return next(at for at in reversed(range(moment)) if uses[at] == unit)


def _frequency(uses: Sequence[int], moment: int, unit: int) -> float:
    return float(sum(_DECAY ** (moment - at) for at in range(moment) if uses[at] == unit))


def smallest_window(compute_s: Sequence[float], load_s: Sequence[float]) -> int:
    """Slots of the smallest window under which no unit is waited for: STRONGHOLD's inequality.

    The unit that comes in when moment i begins is used slots - 1 moments later: its load must fit into what is computed until
    then. At least 2, or nothing could come in ahead; all units if no smaller window does.

    Args:
        compute_s: (moments,) seconds of compute in each moment, in the order of `order_of_use`.
        load_s: (units,) seconds that each unit takes to come in.

    Source: Sun et al. 2022, STRONGHOLD (SC 22), the inequality for transfers in; gradients leave on a link of their own.
    """
    units = len(load_s)
    done = [0.0]
    for each in compute_s:
        done.append(done[-1] + each)
    for slots in range(min(2, units), units):
        if all(load_s[unit] <= done[use] - done[at] for at, use, unit in _arrivals(units, slots)):
            return slots
    return units


def _arrivals(units: int, slots: int) -> list[tuple[int, int, int]]:
    """Of each load that a window does ahead of use: the moment in which it begins, the one that uses it, the unit."""
    uses = order_of_use(units)
    found = []
    for at, loads in enumerate(window(units, slots).loads):
        if at:  # what the first moment needs is waited for whatever the window
            found += [(at, next(i for i in range(at, len(uses)) if uses[i] == unit), unit) for unit in loads]
    return found
