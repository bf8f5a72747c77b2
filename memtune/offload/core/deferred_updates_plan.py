"""Choose the blocks whose host update is deferred to the next step's forward.

A deferred update overlaps with the next forward instead of backward; it is exact, because the block's weights
are reloaded only after their own update. The choice is a small timeline simulation over modelled times per
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_GAIN = 0.99
"""Deferring more blocks must shorten the step by at least 1%, because deferred gradients occupy host memory.
"""


@dataclass(frozen=True)
class BlockTimes:
    """Modelled seconds of each block's computation, copies and host update."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    load_s: Sequence[float]
    """H2D copy of the block's weights, once for each pass."""
    down_s: Sequence[float]
    """D2H copy of the block's gradients."""
    update_s: Sequence[float]
    outside_s: float
    """Parameters in no block, inside `optimizer.step()`: D2H of gradients, update, H2D of weights."""

    @property
    def count(self) -> int:
        """Return the number of blocks."""
        return len(self.update_s)


def period_s(times: BlockTimes, deferred: frozenset[int]) -> float:
    """Return the seconds from one step to the next, if updates of `deferred` blocks overlap with forward."""
    # One thread updates. A block's H2D copy starts after its update and after the copy of the block
    # before; its D2H copy overlaps with the backward of the next block, and its update starts when the
    # copy and the previous update have ended (`offload.parameters.offloader`). The window is as wide as
    # the transfers need.
    free = up = now = 0.0
    for block in range(times.count):
        if block in deferred:
            free += times.update_s[block]
        up = max(up, free if block in deferred else 0.0) + times.load_s[block]
        now = max(now, up) + times.forward_s[block]
    end, _ = _backward(times, deferred, now)
    return end


def deferred_blocks(times: BlockTimes, shares: Sequence[float] = ()) -> frozenset[int]:
    """Return the blocks to defer: those whose update finds the thread busy, if that shortens the step.

    Args:
        times: Modelled times of the blocks.
        shares: Shares of all blocks, evenly spread, to try as well: updates then overlap with all of forward
            and backward.
    """
    _, busy = _backward(times, None, 0.0)
    found = sorted(
        {frozenset[int](), busy - {0}, busy, *(_spread(times.count, share) for share in shares)}, key=len
    )
    periods = [period_s(times, deferred) for deferred in found]
    return next(
        deferred
        for deferred, seconds in zip(found, periods, strict=True)
        if seconds * _LEAST_GAIN <= min(periods)
    )


def _spread(count: int, share: float) -> frozenset[int]:
    deferred = max(1, round(count * share))
    return frozenset((each + 1) * count // deferred - 1 for each in range(deferred))


def _backward(
    times: BlockTimes, deferred: frozenset[int] | None, begin_s: float
) -> tuple[float, frozenset[int]]:
    """Return the end of a step whose backward starts at `begin_s`, and the blocks that it defers."""
    # With `deferred` None, a block is deferred where the update thread is busy when its gradients arrive.
    left: set[int] = set()
    now = up = down = free = begin_s

    def finish_copy(block: int) -> None:
        """Wait for the D2H copy of the block's gradients, then update or defer the block."""
        nonlocal now, free
        now = max(now, down)
        if free > now if deferred is None else block in deferred:
            left.add(block)
        else:
            now = max(now, free)  # its gradients wait for one update at most (`PendingUpdates`)
            free = now + times.update_s[block]

    for block in reversed(range(times.count)):
        up += times.load_s[block] if block < times.count - 1 else 0.0  # the last one is resident
        now = max(now, up) + times.backward_s[block]
        if block + 1 < times.count:
            finish_copy(block + 1)
        down = max(down, now) + times.down_s[block]
    finish_copy(0)
    return max(now, free) + times.outside_s, frozenset(left)
