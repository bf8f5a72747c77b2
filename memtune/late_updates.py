"""Which blocks' updates the host leaves to the next step's forward: those that would keep backward waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_GAIN = 0.99
"""Of a step that more late blocks would make shorter: their gradients take host memory."""


@dataclass(frozen=True)
class BlockTimes:
    """Seconds by block."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    load_s: Sequence[float]
    """Its weights up, once for each pass."""
    down_s: Sequence[float]
    """Its gradients down."""
    update_s: Sequence[float]
    outside_s: float
    """What the optimizer's step does for parameters in no block: gradients down, update, weights up."""

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.update_s)


def period_s(times: BlockTimes, late: frozenset[int]) -> float:
    """Seconds from a step's begin to the next one's, updates of `late` blocks beside forward, of others beside backward.

    One thread updates. A block's weights come up after its update and after those of the block before; its gradients go down
    beside the next block's backward, and then it is updated, when the update before has ended (`runtime.beside_store`). A window
    is not looked at: it is as wide as transfers need.
    """
    free = up = now = 0.0
    for block in range(times.count):
        if block in late:
            free += times.update_s[block]
        up = max(up, free if block in late else 0.0) + times.load_s[block]
        now = max(now, up) + times.forward_s[block]
    end, _ = _backward(times, late, now)
    return end


def late_blocks(times: BlockTimes, shares: Sequence[float] = ()) -> frozenset[int]:
    """The blocks to leave: those whose turn comes while the thread is busy; none where a step is not shorter by it.

    Args:
        times: Of the blocks.
        shares: Of all blocks, evenly spread, that are looked at as well: updates then run beside all of forward and of backward.
    """
    _, busy = _backward(times, None, 0.0)
    found = sorted({frozenset[int](), busy - {0}, busy, *(_spread(times.count, share) for share in shares)}, key=len)
    periods = [period_s(times, late) for late in found]
    return next(late for late, seconds in zip(found, periods, strict=True) if seconds * _LEAST_GAIN <= min(periods))


def _spread(count: int, share: float) -> frozenset[int]:
    late = max(1, round(count * share))
    return frozenset((each + 1) * count // late - 1 for each in range(late))


def _backward(times: BlockTimes, late: frozenset[int] | None, begin_s: float) -> tuple[float, frozenset[int]]:
    """When a step that comes to its backward at `begin_s` ends, and the blocks that it leaves; `late` None: as they come."""
    left: set[int] = set()
    now = up = down = free = begin_s

    def turn(block: int) -> None:
        nonlocal now, free
        now = max(now, down)
        if free > now if late is None else block in late:
            left.add(block)
        else:
            now = max(now, free)
            free = now + times.update_s[block]

    for block in reversed(range(times.count)):
        up += times.load_s[block] if block < times.count - 1 else 0.0  # the last one is there
        now = max(now, up) + times.backward_s[block]
        if block + 1 < times.count:
            turn(block + 1)
        down = max(down, now) + times.down_s[block]
    turn(0)
    return max(now, free) + times.outside_s, frozenset(left)
