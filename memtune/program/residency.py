"""Residency plans: the offload units on the device at each moment, computed from the order of use.

The runtime and the pass follow the same plan. A step has one *moment* per use of a unit: forward from the
first to the last, backward from the last to the first. When a moment begins, some units are freed, then some
are loaded. No unit is resident after the last moment, since the optimizer changes the weights.

There are two families of rules. A *window* slides over the units and prefetches those used next, which takes
slots. A *cache* loads a unit when it is used and evicts one if no slot is free: the least recently used
(LRU); the least frequently used with decaying counts (LFU); or the one whose next use is farthest (Belady
1966, "A study of replacement algorithms for a virtual-storage computer"), which minimizes loads. A moment may
use several units, and moments may differ in slots.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

Rule = Literal["belady", "lru", "lfu"]
Units = tuple[int, ...]
DECAY = 0.9
"""Factor per moment of LFU's counts of uses."""


@dataclass(frozen=True)
class Residency:
    """Units freed and loaded at the start of each moment; the last entry is the end of backward."""

    drops: tuple[Units, ...]
    """Units that are freed, per moment."""
    loads: tuple[Units, ...]
    """Units that are loaded after that, per moment, in the order of their use."""

    @property
    def moves(self) -> int:
        """Number of loads."""
        return sum(map(len, self.loads))

    def resident(self) -> list[frozenset[int]]:
        """Return the resident units of each moment."""
        found: list[frozenset[int]] = []
        now: frozenset[int] = frozenset()
        for drops, loads in zip(self.drops, self.loads, strict=True):
            now = now - frozenset(drops) | frozenset(loads)
            found.append(now)
        return found


@functools.lru_cache(maxsize=64)
def ssd_reads_by_moment(residency: Residency, read_ahead: int) -> tuple[tuple[Units, Units], ...]:
    """Return the units that are read from SSD in each moment: to load them at once, and as read-ahead.

    Args:
        residency: The loads of each moment.
        read_ahead: Moments between the read of a unit and its load; units of the first moments are read at
            the start of the first one.

    Returns:
        Per moment: units read before the moment's loads, since they are among them, and units read after
        them.
    """
    found: list[tuple[list[int], list[int]]] = [([], []) for _ in residency.loads]
    for moment, units in enumerate(residency.loads):
        # Not before the step: optimizer updates of the previous one would make the bytes stale.
        at = max(moment - read_ahead, 0)
        found[at][at != moment].extend(units)
    return tuple((tuple(now), tuple(later)) for now, later in found)


def order_of_use(units: int, *, gathered: bool = False) -> Units:
    """Return the unit that each moment of a step uses; -1 for none."""
    # FSDP2 prefetches the all-gather of the next unit in backward, so under it (`gathered`) a moment of
    # backward uses the rows of the next unit.
    return (
        (*range(units), *reversed(range(units - 1)), -1)
        if gathered
        else (*range(units), *reversed(range(units)))
    )


@functools.lru_cache(maxsize=64)
def window_residency(units: int, slots: int, *, gathered: bool = False) -> Residency:
    """Return a window of `slots` consecutive units that slides over the model and back.

    Each unit is loaded `slots` - 1 moments before its use. `gathered` is as in `order_of_use`.

    Raises:
        ValueError: `slots` is not between 1 and `units`.
    """
    if not 1 <= slots <= units:
        raise ValueError(f"a window over {units} units has 1 to {units} slots, not {slots}")
    # The window stops at the model's end, so that backward finds the last units resident.
    firsts = [min(unit, units - slots) for unit in range(units)]
    firsts += [max(unit - slots + 1 - gathered, 0) for unit in reversed(range(units))]
    wanted = [frozenset(range(first, first + slots)) for first in firsts]
    uses = order_of_use(units, gathered=gathered)
    # Loads in the order of use: backward uses the last unit first.
    sort_keys = [lambda unit: unit] * units + [lambda unit: -unit] * units
    loads = [
        tuple(sorted(now - before, key=key))
        for now, before, key in zip(wanted, [frozenset(), *wanted], sort_keys, strict=False)
    ]
    drops = [tuple(sorted(before - now)) for now, before in zip(wanted, [frozenset(), *wanted], strict=False)]
    assert all(use < 0 or use in now for use, now in zip(uses, wanted, strict=True))
    return Residency((*drops, tuple(sorted(wanted[-1]))), (*loads, ()))


@functools.lru_cache(maxsize=512)
def cache_residency(uses: tuple[Units, ...], slots: Units, rule: Rule) -> Residency:
    """Return the plan of a cache with `slots` slots, which loads a unit when it is used and not resident.

    Args:
        uses: The recorded units of each moment; all of them are resident in it.
        slots: Most resident units of each moment.
        rule: Eviction rule.

    Raises:
        ValueError: A moment uses more units than it has slots.
    """
    now: set[int] = set()
    drops: list[Units] = []
    loads: list[Units] = []
    history = _UseHistory(uses)
    for moment, (units, room) in enumerate(zip(uses, slots, strict=True)):
        if len(units) > room:
            raise ValueError(f"moment {moment} uses {len(units)} units and has {room} slots")
        missing = tuple(unit for unit in units if unit not in now)
        excess = max(len(now) + len(missing) - room, 0)
        # Never a unit of this moment; the unit number breaks ties, so that every rank evicts alike.
        others = (
            sorted(now.difference(units), key=lambda unit: (*history.value(unit, rule), unit))
            if excess
            else []
        )
        evicted = tuple(others[:excess])
        now.difference_update(evicted)
        now.update(missing)
        drops.append(evicted)
        loads.append(missing)
        history.add_moment(units)
    return Residency((*drops, tuple(sorted(now))), (*loads, ()))


def lru_moves(uses: tuple[Units, ...]) -> Units:
    """Return (units + 1,) the number of loads under LRU for each number of slots.

    Source: Mattson et al. 1970, Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2),
    stack distances.
    """
    # Entry n is `cache_residency(uses, (n,) * moments, "lru").moves`; entries below the most units of
    # one moment are meaningless. With n slots the n most recently used units are resident (of one
    # moment's, the larger numbers first), so one walk over stack distances serves all n.
    latest: list[int] = []
    # Uses by stack distance; the last entry counts first uses, which miss in a cache of any size.
    at_distance = [0] * (len({unit for units in uses for unit in units}) + 1)
    for units in uses:
        for unit in units:
            at_distance[latest.index(unit) if unit in latest else -1] += 1
        # A moment's units are used together; this order is the tie rule of `cache_residency`.
        latest = sorted(units, reverse=True) + [unit for unit in latest if unit not in units]
    return tuple(itertools.accumulate(reversed(at_distance)))[::-1]


class _UseHistory:
    """Past and future uses of units; the unit with the smallest `value` is evicted."""

    def __init__(self, uses: tuple[Units, ...]) -> None:
        self._moment, self._never = 0, len(uses)
        self._to_come: dict[int, list[int]] = {}  # moments of future uses, the next one last
        for moment in reversed(range(len(uses))):
            for unit in uses[moment]:
                self._to_come.setdefault(unit, []).append(moment)
        self._count: dict[int, float] = {}
        self._last: dict[int, int] = {}

    def add_moment(self, units: Units) -> None:
        """End the moment, which used `units`."""
        for unit in units:
            since = self._moment - self._last.get(unit, self._moment)
            self._count[unit] = self._count.get(unit, 0.0) * DECAY**since + 1.0
            self._last[unit] = self._moment
            self._to_come[unit].pop()
        self._moment += 1

    def value(self, unit: int, rule: Rule) -> tuple[float, ...]:
        """Return the sort key of `unit` under `rule`."""
        if rule == "belady":
            to_come = self._to_come[unit]
            return (-(to_come[-1] if to_come else self._never),)
        last = self._last[unit]
        return (last,) if rule == "lru" else (self._count[unit] * DECAY ** (self._moment - last), last)


def smallest_window(compute_s: Sequence[float], load_s: Sequence[float], *, gathered: bool = False) -> int:
    """Return the slots of the smallest window whose loads are hidden by compute: STRONGHOLD's inequality.

    Args:
        compute_s: (moments,) seconds of compute in each moment, in the order of `order_of_use`.
        load_s: (units,) seconds of each unit's load.
        gathered: As in `order_of_use`.

    Source: Sun et al. 2022, STRONGHOLD (SC 22), the inequality for H2D copies; D2H copies of gradients use
        the
    other direction of the link.
    """
    # A unit loaded at the start of moment i is used slots - 1 moments later, so its load must take no
    # longer than the compute until then. The result is at least 2, for a prefetch, and all units if no
    # smaller window suffices.
    units = len(load_s)
    # Smallest first: it leaves the most memory, and the inequality is monotone in the slots.
    for slots in range(min(2, units), units):
        arrivals = _prefetches(units, slots, gathered)
        # The tolerance covers rounding: a load exactly as long as its compute is hidden.
        if all(load_s[unit] <= math.fsum(compute_s[at:use]) * (1 + 1e-12) for at, use, unit in arrivals):
            return slots
    return units


def _prefetches(units: int, slots: int, gathered: bool) -> list[tuple[int, int, int]]:
    """Return the prefetches of a window: moment of the load, moment of the use, unit."""
    uses = order_of_use(units, gathered=gathered)
    found = []
    for at, loads in enumerate(window_residency(units, slots, gathered=gathered).loads):
        if at:  # loads of the first moment are exposed with any window
            found += [(at, next(i for i in range(at, len(uses)) if uses[i] == unit), unit) for unit in loads]
    return found


WRITES_IN_FLIGHT: Final = 2
"""Most concurrent SSD writes of tensors; the oldest one is awaited before another begins."""
T = TypeVar("T")


def ssd_spill_reads(
    offloaded: Sequence[T],
    fetched: Sequence[T],
    read_ahead: int,
    is_there: Callable[[T, T], bool] = lambda tensor, fetch: True,
) -> list[tuple[T, T]]:
    """Return the SSD reads of `activations.offload.ssd_spill` in order, shared by its runtime and its pass.

    Args:
        offloaded: Tensors that will be fetched, in the order in which they were offloaded.
        fetched: The same tensors in the order in which they are fetched.
        read_ahead: Tensors that are read before they are fetched.
        is_there: Whether the first of two tensors is offloaded before the second is fetched; a backward
            inside the loss (`create_graph`) comes before the forward of later calls.

    Returns:
        Pairs: the tensor that is fetched, a tensor that is read at that time.
    """
    # A fetch reads its tensor, unless it was read ahead, then further tensors, the last offloaded one first.
    on_ssd, waiting, found = list(offloaded), 0, []
    is_read: set[T] = set()
    for each in fetched:
        if each in is_read:
            waiting -= 1
        else:
            # Not read ahead, so read on demand, before any read-ahead that this fetch starts.
            on_ssd.remove(each)
            found.append((each, each))
        index = len(on_ssd) - 1
        while index >= 0 and waiting < read_ahead:
            if is_there(on_ssd[index], each):
                found.append((each, on_ssd.pop(index)))
                is_read.add(found[-1][1])
                waiting += 1
            index -= 1
    return found
