"""Cache of experts in host memory: eviction, reads from SSD, and their traffic in a steady step.

Shared by `offload.experts.expert_offload` and its pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memtune.program import DECAY, Rule, Units, order_of_use, window_residency


class HostCache:
    """Cache of experts in host memory; when it is full, the expert with the smallest value is evicted.

    Rules are LFU with decay, LRU, and Belady for the order of blocks, which is known; the experts that a
    block will use are not.

    Args:
        slots: Most experts in the cache.
        rule: Eviction rule.
        block_of: Block of each expert.
        uses: (blocks,) moments in which each block's experts are used, from `moments_of`.
    """

    def __init__(self, slots: int, rule: Rule, block_of: Sequence[int], uses: Sequence[Units]) -> None:
        self.slots, self._rule, self._block_of, self._uses = slots, rule, block_of, uses
        self.held: dict[int, None] = {}
        self._count: dict[int, float] = {}
        self._last: dict[int, int] = {}
        self._clock = 0

    def insert(self, expert: int, moment: int) -> tuple[bool, int | None]:
        """Put `expert` into the cache; return whether it must be read, and the expert evicted for it."""
        if expert in self.held:
            return False, None
        evicted = None
        if len(self.held) == self.slots:
            # The number breaks ties, so that runtime and pass evict the same expert.
            evicted = min(self.held, key=lambda each: (*self._priority(each, moment), each))
            del self.held[evicted]
        self.held[expert] = None
        return True, evicted

    def count_use(self, expert: int) -> None:
        """Count a use."""
        # Uses, not moments: several experts of one block are used one after the other.
        self._clock += 1
        # LFU with decay: experts of long ago must not displace those that the router prefers now.
        since = self._clock - self._last.get(expert, self._clock)
        self._count[expert] = self._count.get(expert, 0.0) * DECAY**since + 1.0
        self._last[expert] = self._clock

    def _priority(self, expert: int, moment: int) -> tuple[float, ...]:
        if self._rule == "belady":
            uses, period = self._uses[self._block_of[expert]], 2 * len(self._uses) + 1
            # Experts of one block tie; the last one is evicted first.
            return (-min((use - moment - 1) % period for use in uses), -expert)
        last = self._last.get(expert, self._clock)  # an expert that was read ahead counts as used
        if self._rule == "lru":
            return (last,)
        return (self._count.get(expert, 1.0) * DECAY ** (self._clock - last), last)


def moments_of(blocks: int, on_device: int, gathered: bool = False) -> tuple[Units, ...]:
    """Return (blocks,) the moments in which a block's experts are needed on the host: for loads and the
    update.

    `gathered` is as in `order_of_use`.
    """
    loads = window_residency(blocks, min(on_device, blocks), gathered=gathered).loads
    return tuple(
        (*(m for m, units in enumerate(loads) if block in units), 2 * blocks - block)
        for block in range(blocks)
    )


def experts_to_read(
    moment: int,
    read_ahead: int,
    slots: int,
    forward: Sequence[Sequence[int]],
    back: Sequence[Sequence[int]],
    gathered: bool = False,
) -> list[int]:
    """Return the experts to read from SSD when `moment` begins: those of the next moments, if slots allow.

    Args:
        moment: The moment that begins.
        read_ahead: Number of moments after it whose experts are read.
        slots: Slots of the host cache, including those for the moment's own experts.
        forward: (blocks,) experts that each block's forward is predicted to use.
        back: (blocks,) experts that its backward uses.
        gathered: As in `order_of_use`.
    """
    blocks = len(forward)
    used = [
        () if block < 0 else (forward if at < blocks else back)[block]
        for at, block in enumerate(order_of_use(blocks, gathered=gathered))
    ]
    if moment >= len(used):
        return []
    wanted: dict[int, None] = {}
    for each in used[moment : moment + 1 + read_ahead]:
        wanted.update(dict.fromkeys(each))
    now = set(used[moment])
    # More would evict experts that are read for an earlier moment.
    return [expert for expert in list(wanted)[:slots] if expert not in now]


class ExpertTraffic(NamedTuple):
    """Experts that are written to and read from SSD when a moment begins, in order."""

    written: Units
    read: Units


def expert_traffic(
    block_of: Sequence[int],
    blocks: int,
    slots: int,
    rule: Rule,
    read_ahead: int,
    on_device: int,
    gathered: bool = False,
) -> tuple[ExpertTraffic, ...]:
    """Return (moments,) the SSD traffic of a steady step that uses every expert."""
    cache = HostCache(slots, rule, block_of, moments_of(blocks, on_device, gathered))
    members = _members(block_of, blocks)
    residency, dirty = window_residency(blocks, min(on_device, blocks), gathered=gathered), set[int]()
    found: list[ExpertTraffic] = []
    for _ in range(3):  # the cache is in a steady state after the first steps
        found = []
        for moment in range(2 * blocks + 1):
            written: list[int] = []
            read: list[int] = []

            def load(
                expert: int, moment: int = moment, written: list[int] = written, read: list[int] = read
            ) -> None:
                must_read, evicted = cache.insert(expert, moment)
                if evicted is not None and evicted in dirty:
                    dirty.discard(evicted)
                    written.append(evicted)
                if must_read:
                    read.append(expert)

            for expert in (each for block in residency.loads[moment] for each in members[block]):
                load(expert)
                cache.count_use(expert)
            if moment > blocks:
                for expert in members[2 * blocks - moment]:
                    load(expert)
                    cache.count_use(expert)
                    dirty.add(expert)
            # After the moment's own loads, as in the runtime: they must not be evicted for a guess.
            for expert in experts_to_read(moment, read_ahead, slots, members, members, gathered):
                load(expert)
            found.append(ExpertTraffic(tuple(written), tuple(read)))
    return tuple(found)


def _members(block_of: Sequence[int], blocks: int) -> list[list[int]]:
    return [[expert for expert, block in enumerate(block_of) if block == each] for each in range(blocks)]
