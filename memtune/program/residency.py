"""Which units are on the device when: planned once from the order in which they are used, followed by
mechanism and pass.

A step has a *moment* for each use of a unit: forward of the first to the last one, backward of the last to
the first one. When a moment begins, some units are let go, then some are brought in. After the last moment
none is on the device, since the weights change.

Two families of rules. A *window* slides over the units: those that are used next come in ahead of their use,
at a price of the slots they take. A *cache* brings a unit in when it is used and lets one go when it must:
the one used longest ago (LRU), the one used least often lately (LFU, what is long ago counts less), or the
one that is used again last of all (Belady 1966, "A study of replacement algorithms for a virtual-storage
computer", which no other rule beats in moves). A moment may use several units, and have slots of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

Rule = Literal["belady", "lru", "lfu"]
Units = tuple[int, ...]
DECAY = 0.9
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


@functools.lru_cache(maxsize=64)
def reads_ahead(residency: Residency, ahead: int) -> tuple[tuple[Units, Units], ...]:
    """Of each moment, the units that are read from SSD then: before they come in themselves, and after what
    comes in has.

    Args:
        residency: What comes in when.
        ahead: Moments by which a unit is read before it comes in; what the first moment needs is read when it
            begins.
    """
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in residency.loads]
    for moment, units in enumerate(residency.loads):
        at = max(moment - ahead, 0)
        found[at][at != moment].extend(units)
    return tuple((tuple(now), tuple(later)) for now, later in found)


def order_of_use(units: int, *, gathered: bool = False) -> Units:
    """The unit of each moment of a step over `units` units; -1 for none.

    Args:
        units: How many there are.
        gathered: A unit is gathered from ranks, in backward one moment ahead; so what is used then are the
            next one's rows.
    """
    return (
        (*range(units), *reversed(range(units - 1)), -1)
        if gathered
        else (*range(units), *reversed(range(units)))
    )


@functools.lru_cache(maxsize=64)
def window(units: int, slots: int, *, gathered: bool = False) -> Residency:
    """`slots` consecutive units slide over the model and back, each there `slots` - 1 moments before its use.

    `gathered` is as in `order_of_use`.

    Raises:
        ValueError: `slots` is not between 1 and `units`.
    """
    if not 1 <= slots <= units:
        raise ValueError(f"a window over {units} units has 1 to {units} slots, not {slots}")
    firsts = [min(unit, units - slots) for unit in range(units)]
    firsts += [max(unit - slots + 1 - gathered, 0) for unit in reversed(range(units))]
    wanted = [frozenset(range(first, first + slots)) for first in firsts]
    uses = order_of_use(units, gathered=gathered)
    ahead = [lambda unit: unit] * units + [lambda unit: -unit] * units
    loads = [
        tuple(sorted(now - before, key=key))
        for now, before, key in zip(wanted, [frozenset(), *wanted], ahead, strict=False)
    ]
    drops = [tuple(sorted(before - now)) for now, before in zip(wanted, [frozenset(), *wanted], strict=False)]
    assert all(use < 0 or use in now for use, now in zip(uses, wanted, strict=True))
    return Residency((*drops, tuple(sorted(wanted[-1]))), (*loads, ()))


@functools.lru_cache(maxsize=512)
def cached(uses: tuple[Units, ...], slots: Units, rule: Rule) -> Residency:
    """At most `slots` units at once, each brought in when it is used and not there.

    Args:
        uses: The units of each moment, as recorded; all of them are there in it.
        slots: Units that may be on the device in each moment.
        rule: Which of the others go when there is no slot left.

    Raises:
        ValueError: A moment uses more units than it has slots.
    """
    now: set[int] = set()
    drops: list[Units] = []
    loads: list[Units] = []
    seen = _Seen(uses)
    for moment, (units, room) in enumerate(zip(uses, slots, strict=True)):
        if len(units) > room:
            raise ValueError(f"moment {moment} uses {len(units)} units and has {room} slots")
        missing = tuple(unit for unit in units if unit not in now)
        leaving = max(len(now) + len(missing) - room, 0)
        others = (
            sorted(now.difference(units), key=lambda unit: (*seen.value(unit, rule), unit)) if leaving else []
        )
        gone = tuple(others[:leaving])
        now.difference_update(gone)
        now.update(missing)
        drops.append(gone)
        loads.append(missing)
        seen.use(units)
    return Residency((*drops, tuple(sorted(now))), (*loads, ()))


def lru_moves(uses: tuple[Units, ...]) -> Units:
    """(units + 1,) by slots, how many times a unit comes in under LRU: `cached(...).moves` where every moment
    has as many slots.

    Entries below the most units of one moment mean nothing. With n slots, what is there is always the n units
    that were used last (of one moment's, the larger numbers first), so one walk tells for all n at once.

    Source: Mattson et al. 1970, Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2),
    stack distances.
    """
    latest: list[int] = []
    at_least = [0] * (
        len({unit for units in uses for unit in units}) + 1
    )  # uses that so many slots are too few for
    for units in uses:
        for unit in units:
            at_least[latest.index(unit) if unit in latest else -1] += 1
        latest = sorted(units, reverse=True) + [unit for unit in latest if unit not in units]
    return tuple(itertools.accumulate(reversed(at_least)))[::-1]


class _Seen:
    """What has been used, and what will be: the unit of the smallest `value` is the one to let go."""

    def __init__(self, uses: tuple[Units, ...]) -> None:
        self._moment, self._never = 0, len(uses)
        self._to_come: dict[int, list[int]] = {}  # moments, the next one last
        for moment in reversed(range(len(uses))):
            for unit in uses[moment]:
                self._to_come.setdefault(unit, []).append(moment)
        self._count: dict[int, float] = {}
        self._last: dict[int, int] = {}

    def use(self, units: Units) -> None:
        """The moment is over."""
        for unit in units:
            since = self._moment - self._last.get(unit, self._moment)
            self._count[unit] = self._count.get(unit, 0.0) * DECAY**since + 1.0
            self._last[unit] = self._moment
            self._to_come[unit].pop()
        self._moment += 1

    def value(self, unit: int, rule: Rule) -> tuple[float, ...]:
        if rule == "belady":
            to_come = self._to_come[unit]
            return (-(to_come[-1] if to_come else self._never),)
        last = self._last[unit]
        return (last,) if rule == "lru" else (self._count[unit] * DECAY ** (self._moment - last), last)


def smallest_window(compute_s: Sequence[float], load_s: Sequence[float], *, gathered: bool = False) -> int:
    """Slots of the smallest window under which no unit is waited for: STRONGHOLD's inequality.

    The unit that comes in when moment i begins is used slots - 1 moments later: its load must fit into what
    is computed until then. At least 2, or nothing could come in ahead; all units if no smaller window does.

    Args:
        compute_s: (moments,) seconds of compute in each moment, in the order of `order_of_use`.
        load_s: (units,) seconds that each unit takes to come in.
        gathered: As in `order_of_use`.

    Source: Sun et al. 2022, STRONGHOLD (SC 22), the inequality for transfers in; gradients leave on a link of
    their own.
    """
    units = len(load_s)
    for slots in range(min(2, units), units):
        arrivals = _arrivals(units, slots, gathered)
        # Rounded once: a load as long as what it hides behind is not waited for.
        if all(load_s[unit] <= math.fsum(compute_s[at:use]) * (1 + 1e-12) for at, use, unit in arrivals):
            return slots
    return units


def _arrivals(units: int, slots: int, gathered: bool) -> list[tuple[int, int, int]]:
    """Of each load that a window does ahead of use: the moment in which it begins, the one that uses it, the
    unit.
    """
    uses = order_of_use(units, gathered=gathered)
    found = []
    for at, loads in enumerate(window(units, slots, gathered=gathered).loads):
        if at:  # what the first moment needs is waited for whatever the window
            found += [(at, next(i for i in range(at, len(uses)) if uses[i] == unit), unit) for unit in loads]
    return found


# In which order tensors are read from SSD before they are asked for: shared by the mechanisms and the passes.
WRITES_IN_FLIGHT: Final = 2
"""Tensors that are being written at once; before another write begins, the oldest is finished."""
T = TypeVar("T")


def reads(left: Sequence[T], asked: Sequence[T], ahead: int) -> list[tuple[T, T]]:
    """The reads of `activations.offload.ssd_spill`, Rule 3: (the tensor that is fetched, a tensor that is
    read then), in order.

    Args:
        left: Tensors that are fetched some time, in the order in which they left.
        asked: The same ones in the order in which they are fetched.
        ahead: How many tensors are read before they are asked for.
    """
    shelved, waiting, found = list(left), 0, []
    is_read: set[T] = set()
    for each in asked:
        if each in is_read:
            waiting -= 1
        else:
            shelved.remove(each)
            found.append((each, each))
        while shelved and waiting < ahead:
            found.append((each, shelved.pop()))
            is_read.add(found[-1][1])
            waiting += 1
    return found
