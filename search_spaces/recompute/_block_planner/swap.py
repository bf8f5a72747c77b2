"""Decide how many bytes of activations to swap rather than recompute (LoHan, traffic-aware activation
swapping).

Swapping is decided in *parts*. Of a block's undominated combinations of kept and recomputed tensors, those on
the lower convex hull are taken, each with more bytes and fewer seconds of recomputation than the one before.
The part between two neighbours has a benefit: seconds saved per byte. Parts of all blocks are taken in order
of benefit, so the seconds of recomputation are convex in the bytes swapped. So is the step time, a sum of
maxima of such functions, and bisection finds its minimum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memtune.hardware import Hardware, op_costs
from memtune.program import Phase, Program, Resource
from memtune.search_spaces.recompute._block_planner.tensor_options import Action, BlockOp, Combination


@dataclass(frozen=True)
class Part:
    """The next bytes of one block to swap."""

    block: int
    n_bytes: int
    saved_s: float
    """Seconds of recomputation saved."""

    @property
    def benefit(self) -> float:
        """Seconds saved per byte."""
        return self.saved_s / self.n_bytes


@dataclass(frozen=True)
class Busy:
    """Seconds that each resource works in a micro-batch whatever is swapped, without recomputation."""

    forward: Mapping[Resource, float]
    backward: Mapping[Resource, float]
    boundary: Mapping[Resource, float]
    """Additional seconds in the last micro-batch's backward."""
    micro_batches: int


def busy_seconds(program: Program, hardware: Hardware) -> Busy:
    """Return the seconds that `program`, after all later passes, asks of each resource."""
    step = program.step
    op_s = op_costs(step, hardware, ranks=program.ranks).op_s

    def total(*phases: Phase) -> dict[Resource, float]:
        in_phases = np.isin(step.ops.phase, phases)
        return {each: float(op_s[in_phases & (step.ops.resource == each)].sum()) for each in Resource}

    return Busy(total(Phase.FORWARD), total(Phase.BACKWARD), total(Phase.BOUNDARY), program.accumulate)


def step_s(
    busy: Busy,
    hardware: Hardware,
    swapped_bytes: int,
    recompute_s: float,
    spilled_bytes: int = 0,
    *,
    waits: bool = False,
) -> float:
    """Return the seconds of a step's forwards and backwards, T(A): each lasts as long as its busiest resource
    works.

    Args:
        busy: Seconds of everything else.
        hardware: Its links carry the swapped tensors.
        swapped_bytes: Bytes per micro-batch, copied to the host in forward and back in backward.
        recompute_s: Seconds of recomputation in a micro-batch.
        spilled_bytes: The part of `swapped_bytes` that is written to SSD in forward and read in backward.
        waits: Compute waits for every copy over the link; otherwise copies overlap it.
    """
    out = {
        Resource.DEVICE_TO_HOST: swapped_bytes / hardware.device_to_host_bytes_per_s,
        Resource.SSD_WRITE: spilled_bytes / hardware.ssd_write_bytes_per_s,
    }
    back = {
        Resource.HOST_TO_DEVICE: swapped_bytes / hardware.host_to_device_bytes_per_s,
        Resource.COMPUTE: recompute_s,
        Resource.SSD_READ: spilled_bytes / hardware.ssd_read_bytes_per_s,
    }
    # Compute is idle during each copy, so their seconds add up.
    if waits:
        out[Resource.COMPUTE] = out[Resource.DEVICE_TO_HOST]
        back[Resource.COMPUTE] += back[Resource.HOST_TO_DEVICE]
    forward = max(seconds + out.get(each, 0.0) for each, seconds in busy.forward.items())
    backward = max(seconds + back.get(each, 0.0) for each, seconds in busy.backward.items())
    # Ops at the boundary, such as reduced gradients, share links with the copies of the last backward.
    last = max(seconds + busy.boundary[each] + back.get(each, 0.0) for each, seconds in busy.backward.items())
    return busy.micro_batches * forward + (busy.micro_batches - 1) * backward + last


def hull(ops: tuple[BlockOp, ...], found: Sequence[Combination], min_bytes: int) -> list[Combination]:
    """Return a block's combinations on the lower convex hull of bytes swapped and seconds, fewest bytes
    first.

    Each swaps the tensors that it keeps, except those smaller than `min_bytes`.
    """
    points = sorted(
        (_swapped(ops, each, min_bytes) for each in found),
        # Of equal bytes the fastest comes first, so the others fail the test below.
        key=lambda each: (bytes_of(ops, each), each.seconds),
    )
    kept: list[Combination] = []
    for point in points:
        if kept and point.seconds >= kept[-1].seconds:
            continue
        # A middle point above the line between its neighbours would give parts out of the order of benefit.
        while len(kept) > 1 and _slope(ops, kept[-2], kept[-1]) >= _slope(ops, kept[-1], point):
            kept.pop()
        kept.append(point)
    return kept


def _slope(ops: tuple[BlockOp, ...], one: Combination, other: Combination) -> float:
    return (other.seconds - one.seconds) / (bytes_of(ops, other) - bytes_of(ops, one))


def _swapped(ops: tuple[BlockOp, ...], combination: Combination, min_bytes: int) -> Combination:
    def action(i: int, now: Action | None) -> Action | None:
        return Action.HOST if now is Action.KEEP and ops[i].bytes >= min_bytes else now

    return Combination(
        tuple(action(i, each) for i, each in enumerate(combination.actions)),
        combination.held_bytes,
        combination.seconds,
    )


def bytes_of(ops: tuple[BlockOp, ...], combination: Combination) -> int:
    """Return the bytes that a combination swaps."""
    return sum(ops[i].bytes for i in combination.moved)


def parts_of(block: int, ops: tuple[BlockOp, ...], points: Sequence[Combination]) -> list[Part]:
    """Return the parts between neighbours of a block's hull, in order of benefit."""
    return [
        Part(block, bytes_of(ops, b) - bytes_of(ops, a), a.seconds - b.seconds) for a, b in pairwise(points)
    ]


def spilled_blocks(swapped_bytes: Mapping[int, int], host_bytes: int) -> list[int]:
    """Return the first blocks, whose backward is last: their tensors go on to SSD, others fit on the host."""
    found, left = list[int](), sum(swapped_bytes.values())
    # The first blocks' tensors are needed last, so their way through the SSD has the most time.
    for block in sorted(swapped_bytes):
        if left <= host_bytes:
            break
        if swapped_bytes[block]:
            found.append(block)
            left -= swapped_bytes[block]
    return found


def argmin_convex(cost: Callable[[int], float], last: int) -> int:
    """Return the smallest number from 0 to `last` that minimizes the convex function `cost`."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        # On a plateau the smaller number wins: fewer bytes on the link for the same time.
        if cost(middle + 1) < cost(middle):
            low = middle + 1
        else:
            high = middle
    return low


def exposed_s(ranked: Sequence[Part], hardware: Hardware) -> list[float]:
    """Return, by the number of `ranked` parts swapped, the seconds of copies that no compute can overlap."""
    # These are the copies of one block: out after the last forward, in before the first backward.
    by_block, most, found = Counter[int](), 0, [0.0]
    for part in ranked:
        by_block[part.block] += part.n_bytes
        most = max(most, by_block[part.block])
        found.append(most / hardware.device_to_host_bytes_per_s + most / hardware.host_to_device_bytes_per_s)
    return found


@dataclass(frozen=True, eq=False)
class SwapChoice:
    """The parts that are swapped, and the step times that were compared."""

    parts: tuple[Part, ...]
    """All parts, by benefit; equal ones in the order of their blocks."""
    count: int
    """Number of parts that are swapped."""
    costs_s: Callable[[int], float]
    """T by number of parts."""

    @classmethod
    def fastest(
        cls,
        parts: Sequence[Part],
        busy: Busy,
        hardware: Hardware,
        fixed_bytes: int,
        host_bytes: int | None,
        *,
        spill: bool = False,
        waits: bool = False,
    ) -> SwapChoice:
        """Return the smallest number of parts with which a step takes the least time.

        Args:
            parts: Parts of all blocks.
            busy: Seconds of everything else.
            hardware: Its links.
            fixed_bytes: Bytes that are swapped in any case.
            host_bytes: Most bytes that may be on the host.
            spill: Bytes beyond `host_bytes` go on to SSD; otherwise they are not swapped.
            waits: Compute waits for every copy.
        """
        # Copies that nothing can overlap (`exposed_s`) are added to T. They only grow, so the
        # number is at most the one that minimizes T alone.
        ranked = sorted(parts, key=lambda each: -each.benefit)
        swapped = fixed_bytes + np.concatenate([[0], np.cumsum([each.n_bytes for each in ranked])]).astype(
            np.int64
        )
        saved = np.concatenate([[0.0], np.cumsum([each.saved_s for each in ranked])])
        again = float(saved[-1]) - saved

        def cost(count: int) -> float:
            spilled = max(int(swapped[count]) - (host_bytes or 0), 0) if spill else 0
            return step_s(busy, hardware, int(swapped[count]), float(again[count]), spilled, waits=waits)

        room = (
            len(ranked)
            if host_bytes is None or spill
            else int(np.searchsorted(swapped, host_bytes, side="right")) - 1
        )
        count = argmin_convex(cost, max(room, 0))
        if not waits:
            alone = exposed_s(ranked[:count], hardware)
            # With `exposed_s` the cost is no longer convex, so all smaller numbers are compared.
            count = min(range(count + 1), key=lambda each: cost(each) + alone[each])
        return cls(tuple(ranked), count, cost)

    def swapped_parts(self) -> Counter[int]:
        """Return, by block, the number of its parts that are swapped."""
        return Counter(each.block for each in self.parts[: self.count])
