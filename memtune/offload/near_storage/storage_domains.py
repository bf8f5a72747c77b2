"""Optimizer state divided evenly over storage domains, whatever the model: what
`offload.near_storage.update_workers` and its pass both go by.

All parameters, flattened, are one row of numbers; each domain (a drive, or a directory on one) owns an equal
part of it, cut into sub-groups. A step goes round by round, one sub-group of every domain at a time, by the
rules of `offload.near_storage.update_workers`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

SLOTS: Final = 2
"""Sub-groups of a domain whose gradients or weights are between trainer and updater at once."""
ALIGN: Final = 64
"""Bytes: where the part of each parameter begins in a slot, for the native update's vectors."""
READ, DOWN, UPDATE, WRITE, LATER, UP = range(6)
"""A sub-group is read from SSD; its gradients go down; it is updated; weights, then moments, are written; its
weights go up.
"""


class Segment(NamedTuple):
    """Elements of one parameter that are in one sub-group."""

    parameter: int
    start: int
    """First element of the parameter."""
    numel: int
    weight: int
    """First element in the sub-group's weights."""
    moment: int
    """First element in the sub-group's moments, of which each has `numel`."""
    slot: int
    """First byte in a slot, of gradients as wide as the parameter."""


@dataclass(frozen=True)
class SubGroup:
    """What is read, updated and written at once."""

    segments: tuple[Segment, ...]
    numel: int
    moments: int
    """Elements of all moments."""
    slot_bytes: int


@dataclass(frozen=True, eq=False)
class Layout:
    """Every domain's sub-groups."""

    domains: tuple[tuple[SubGroup, ...], ...]

    @property
    def _all(self) -> list[SubGroup]:
        return [each for domain in self.domains for each in domain]

    @property
    def slot_bytes(self) -> int:
        """Of a slot that any sub-group's gradients fit into."""
        return max((each.slot_bytes for each in self._all), default=0)

    @property
    def buffer_numel(self) -> int:
        """Elements of a buffer that any sub-group's weights and moments fit into."""
        return max((each.numel + each.moments for each in self._all), default=0)

    def slots(self, domain: int) -> int:
        """Slots that a domain has: no more than it has sub-groups."""
        return min(SLOTS, len(self.domains[domain]))

    def buffers(self, domain: int, most: int) -> int:
        """Buffers that a domain has: no more than it has sub-groups."""
        return min(most, len(self.domains[domain]))


@functools.lru_cache(maxsize=16)
def divide(
    numel: tuple[int, ...], itemsize: tuple[int, ...], moments: tuple[int, ...], domains: int, most: int
) -> Layout:
    """The parameters over `domains` domains.

    Args:
        numel: Elements of each parameter.
        itemsize: Bytes of an element of each on the device.
        moments: Tensors as large as the parameter that the optimizer keeps for each.
        domains: How many updaters there are.
        most: Elements of a sub-group.
    """
    total = sum(numel)
    cuts = [total * domain // domains for domain in range(domains + 1)]
    firsts = [0]
    for each in numel:
        firsts.append(firsts[-1] + each)
    found, at = [], 0
    for begin, end in pairwise(cuts):
        groups = []
        for first in range(begin, end, most):
            last = min(first + most, end)
            while firsts[at + 1] <= first:
                at += 1
            groups.append(_sub_group(first, last, at, firsts, itemsize, moments))
        found.append(tuple(groups))
    return Layout(tuple(found))


def _sub_group(
    first: int, last: int, at: int, firsts: list[int], itemsize: Sequence[int], moments: Sequence[int]
) -> SubGroup:
    segments: list[Segment] = []
    weight = moment = slot = 0
    while firsts[at] < last:
        start, end = max(first, firsts[at]), min(last, firsts[at + 1])
        if end > start:
            count = end - start
            segments.append(Segment(at, start - firsts[at], count, weight, moment, slot))
            weight, moment = weight + count, moment + count * moments[at]
            slot += -(-count * itemsize[at] // ALIGN) * ALIGN
        at += 1
    return SubGroup(tuple(segments), weight, moment, slot)


def sent(segment: Segment, itemsize: int, share: float) -> tuple[int, int]:
    """How many gradients of `segment` are sent, a `share` of them, and the byte of its slot at which their
    places begin.
    """
    count = math.ceil(share * segment.numel)
    return count, -(-count * itemsize // 4) * 4


class Turn(NamedTuple):
    """One act of a step: `nth` counts the sub-groups of a domain that are updated."""

    what: int
    domain: int
    nth: int


def turns(counts: Sequence[int], buffers: int) -> list[Turn]:
    """All acts of a step in their order, by Rules 1 to 4 of `offload.near_storage.update_workers`.

    Args:
        counts: Sub-groups of each domain that are updated.
        buffers: Sub-groups that a domain holds in host memory at once, 2 or more.
    """
    rounds = max(counts, default=0)
    found = [
        Turn(READ, domain, i) for i in range(buffers) for domain, count in enumerate(counts) if i < count
    ]
    for i in range(rounds + 1):
        now = [domain for domain, count in enumerate(counts) if i < count]
        found += [Turn(DOWN, domain, i) for domain in now]
        for domain in now:
            found += [Turn(what, domain, i) for what in (UPDATE, WRITE, LATER)]
            if 0 < i and i - 1 + buffers < counts[domain]:
                found.append(Turn(READ, domain, i - 1 + buffers))
        found += [Turn(UP, domain, i - 1) for domain, count in enumerate(counts) if 0 < i <= count]
    return found
