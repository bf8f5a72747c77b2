"""Division of optimizer state over storage domains, and the order of a step's actions; shared by runtime and
pass.

All parameters, flattened, form one row of numbers. Each domain (a drive, or a directory on one) owns an equal
part of it, cut into sub-groups. A step goes round by round, with one sub-group of each domain per round
(`offload.near_storage.update_workers`).
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
"""Bytes: alignment of each parameter's part in a slot, for the native update's vectors."""
READ, OFFLOAD, UPDATE, WRITE_WEIGHTS, WRITE_MOMENTS, RELOAD = range(6)
"""Actions on a sub-group, in order: read, offload gradients, update, write weights and moments, copy."""


class Segment(NamedTuple):
    """The elements of one parameter that are in one sub-group."""

    parameter: int
    start: int
    """First element, in the parameter."""
    numel: int
    weight: int
    """First element, in the sub-group's weights."""
    moment: int
    """First element, in the sub-group's moments; each moment has `numel`."""
    slot: int
    """First byte in a slot; gradients have the parameter's dtype."""


@dataclass(frozen=True)
class SubGroup:
    """Elements that are read, updated and written together."""

    segments: tuple[Segment, ...]
    numel: int
    moments: int
    """Number of elements of all moments."""
    slot_bytes: int


@dataclass(frozen=True, eq=False)
class Layout:
    """The sub-groups of each domain."""

    domains: tuple[tuple[SubGroup, ...], ...]

    @property
    def _sub_groups(self) -> list[SubGroup]:
        return [each for domain in self.domains for each in domain]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds any sub-group's gradients."""
        return max((each.slot_bytes for each in self._sub_groups), default=0)

    @property
    def buffer_numel(self) -> int:
        """Elements of a buffer that holds any sub-group's weights and moments."""
        return max((each.numel + each.moments for each in self._sub_groups), default=0)

    def slots(self, domain: int) -> int:
        """Return the number of slots of a domain, at most its number of sub-groups."""
        return min(SLOTS, len(self.domains[domain]))

    def buffers(self, domain: int, most: int) -> int:
        """Return the number of buffers of a domain, at most its number of sub-groups."""
        return min(most, len(self.domains[domain]))


@functools.lru_cache(maxsize=16)
def divide(
    numel: tuple[int, ...], itemsize: tuple[int, ...], moments: tuple[int, ...], domains: int, most: int
) -> Layout:
    """Divide the parameters over `domains` domains.

    Args:
        numel: Elements of each parameter.
        itemsize: Bytes of an element of each on the device.
        moments: Number of moments that the optimizer keeps for each.
        domains: Number of updaters.
        most: Maximal number of elements of a sub-group.
    """
    total = sum(numel)
    # By elements, across parameters: all drives then finish a step at the same time.
    cuts = [total * domain // domains for domain in range(domains + 1)]
    firsts = [0]
    for each in numel:
        firsts.append(firsts[-1] + each)
    found, at = [], 0
    for begin, end in pairwise(cuts):
        groups = []
        for first in range(begin, end, most):
            last = min(first + most, end)
            # The parameter in which the sub-group begins; empty ones own no element.
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


def topk_layout(segment: Segment, itemsize: int, share: float) -> tuple[int, int]:
    """Return the number of gradients of `segment` that are sent, and the byte where their indices begin."""
    count = math.ceil(share * segment.numel)
    # Indices are int32, so they are aligned to 4 bytes after the values.
    return count, -(-count * itemsize // 4) * 4


class Action(NamedTuple):
    """One action of a step on one sub-group."""

    kind: int
    domain: int
    nth: int


def step_actions(counts: Sequence[int], buffers: int) -> list[Action]:
    """Return all actions of a step in order, as `offload.near_storage.update_workers` describes."""
    rounds = max(counts, default=0)
    found = [
        Action(READ, domain, i) for i in range(buffers) for domain, count in enumerate(counts) if i < count
    ]
    for i in range(rounds + 1):
        now = [domain for domain, count in enumerate(counts) if i < count]
        found += [Action(OFFLOAD, domain, i) for domain in now]
        for domain in now:
            found += [Action(kind, domain, i) for kind in (UPDATE, WRITE_WEIGHTS, WRITE_MOMENTS)]
            # Into the buffer of round i - 1, one round after its writes were ordered: a read waits for these
            # and would delay the update of this round.
            if 0 < i and i - 1 + buffers < counts[domain]:
                found.append(Action(READ, domain, i - 1 + buffers))
        # Behind the orders of round i: the trainer waits here for round i - 1 while the updaters work on
        # round i (Rule 4).
        found += [Action(RELOAD, domain, i - 1) for domain, count in enumerate(counts) if 0 < i <= count]
    return found
