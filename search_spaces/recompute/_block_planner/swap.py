"""How many bytes of activations to swap rather than recompute (LoHan, traffic-aware activation swapping).

What may be swapped comes in *parts*: of a block's undominated combinations of kept and recomputed tensors
those on the lower convex hull, each next one with more bytes and fewer seconds of recomputation; the part
between two neighbours has a benefit, seconds saved per byte. Parts of all blocks are taken by benefit. So the
seconds of recomputation are convex in the bytes swapped, and so is the step, a sum of maxima of such
functions: its minimum is found by bisection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memtune.hardware import Hardware, op_costs
from memtune.program import Phase, Program, Resource
from memtune.search_spaces.recompute._block_planner.tensor_options import Action, Combination, Made


@dataclass(frozen=True)
class Part:
    """What is swapped next of one block."""

    block: int
    n_bytes: int
    saved_s: float
    """Of recomputation."""

    @property
    def benefit(self) -> float:
        """Seconds per byte."""
        return self.saved_s / self.n_bytes


@dataclass(frozen=True)
class Busy:
    """Seconds for which each resource works in a micro-batch, whatever is swapped; none for recomputation."""

    forward: Mapping[Resource, float]
    backward: Mapping[Resource, float]
    boundary: Mapping[Resource, float]
    """In the last micro-batch's backward on top."""
    micro_batches: int


def busy_in(program: Program, hardware: Hardware) -> Busy:
    """What `program` asks of each resource, as all later passes leave it."""
    step = program.step
    op_s = op_costs(step, hardware, ranks=program.ranks).op_s

    def total(*phases: Phase) -> dict[Resource, float]:
        mine = np.isin(step.ops.phase, phases)
        return {each: float(op_s[mine & (step.ops.resource == each)].sum()) for each in Resource}

    return Busy(total(Phase.FORWARD), total(Phase.BACKWARD), total(Phase.BOUNDARY), program.accumulate)


def step_s(
    busy: Busy,
    hardware: Hardware,
    swapped_bytes: int,
    again_s: float,
    spilled_bytes: int = 0,
    *,
    waits: bool = False,
) -> float:
    """Seconds of a step's forwards and backwards, T(A): each is as long as its busiest resource works.

    Args:
        busy: By everything else.
        hardware: Its links carry what is swapped.
        swapped_bytes: Of a micro-batch, to the host in forward and back in backward.
        again_s: Of recomputation in a micro-batch.
        spilled_bytes: Of what is swapped, on to SSD in forward and from there in backward.
        waits: Compute waits for every copy over the link; else they run beside it.
    """
    out = {
        Resource.DEVICE_TO_HOST: swapped_bytes / hardware.device_to_host_bytes_per_s,
        Resource.SSD_WRITE: spilled_bytes / hardware.ssd_write_bytes_per_s,
    }
    back = {
        Resource.HOST_TO_DEVICE: swapped_bytes / hardware.host_to_device_bytes_per_s,
        Resource.COMPUTE: again_s,
        Resource.SSD_READ: spilled_bytes / hardware.ssd_read_bytes_per_s,
    }
    if waits:
        out[Resource.COMPUTE] = out[Resource.DEVICE_TO_HOST]
        back[Resource.COMPUTE] += back[Resource.HOST_TO_DEVICE]
    forward = max(seconds + out.get(each, 0.0) for each, seconds in busy.forward.items())
    backward = max(seconds + back.get(each, 0.0) for each, seconds in busy.backward.items())
    last = max(seconds + busy.boundary[each] + back.get(each, 0.0) for each, seconds in busy.backward.items())
    return busy.micro_batches * forward + (busy.micro_batches - 1) * backward + last


def hull(ops: tuple[Made, ...], found: Sequence[Combination], min_bytes: int) -> list[Combination]:
    """Of a block's combinations those on the lower convex hull of bytes swapped and seconds, fewest bytes
    first.

    Each swaps what it keeps, but for tensors smaller than `min_bytes`.
    """
    points = sorted(
        (_swapped(ops, each, min_bytes) for each in found),
        key=lambda each: (bytes_of(ops, each), each.seconds),
    )
    kept: list[Combination] = []
    for point in points:
        if kept and point.seconds >= kept[-1].seconds:
            continue
        while len(kept) > 1 and _slope(ops, kept[-2], kept[-1]) >= _slope(ops, kept[-1], point):
            kept.pop()
        kept.append(point)
    return kept


def _slope(ops: tuple[Made, ...], one: Combination, other: Combination) -> float:
    return (other.seconds - one.seconds) / (bytes_of(ops, other) - bytes_of(ops, one))


def _swapped(ops: tuple[Made, ...], combination: Combination, min_bytes: int) -> Combination:
    def action(i: int, now: Action | None) -> Action | None:
        return Action.HOST if now is Action.KEEP and ops[i].bytes >= min_bytes else now

    return Combination(
        tuple(action(i, each) for i, each in enumerate(combination.actions)),
        combination.held_bytes,
        combination.seconds,
    )


def bytes_of(ops: tuple[Made, ...], combination: Combination) -> int:
    """What a combination swaps."""
    return sum(ops[i].bytes for i in combination.moved)


def parts_of(block: int, ops: tuple[Made, ...], points: Sequence[Combination]) -> list[Part]:
    """The parts between neighbours of a block's hull, in order of benefit."""
    return [
        Part(block, bytes_of(ops, b) - bytes_of(ops, a), a.seconds - b.seconds) for a, b in pairwise(points)
    ]


def spilled_blocks(swapped_bytes: Mapping[int, int], host_bytes: int) -> list[int]:
    """The blocks whose tensors go on to SSD so that the others' have room: the first ones, whose backward is
    last.

    Args:
        swapped_bytes: By block.
        host_bytes: Most that may lie on the host.
    """
    found, left = list[int](), sum(swapped_bytes.values())
    for block in sorted(swapped_bytes):
        if left <= host_bytes:
            break
        if swapped_bytes[block]:
            found.append(block)
            left -= swapped_bytes[block]
    return found


def least(cost: Callable[[int], float], last: int) -> int:
    """The smallest of the numbers 0 to `last` at which `cost`, which is convex, is least."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if cost(middle + 1) < cost(middle):
            low = middle + 1
        else:
            high = middle
    return low


def alone_s(ranked: Sequence[Part], hardware: Hardware) -> list[float]:
    """By how many of `ranked` are swapped, seconds of copies that have nothing to run beside.

    Those are the copies of one block, out after the last forward and back before the first backward.
    """
    by_block, most, found = Counter[int](), 0, [0.0]
    for part in ranked:
        by_block[part.block] += part.n_bytes
        most = max(most, by_block[part.block])
        found.append(most / hardware.device_to_host_bytes_per_s + most / hardware.host_to_device_bytes_per_s)
    return found


@dataclass(frozen=True, eq=False)
class Choice:
    """The parts that are swapped, and what was weighed."""

    parts: tuple[Part, ...]
    """All of them, by benefit; equal ones in the order of their blocks."""
    count: int
    """How many of them are swapped."""
    costs_s: Callable[[int], float]
    """T by number of parts."""

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        busy: Busy,
        hardware: Hardware,
        fixed_bytes: int,
        host_bytes: int | None,
        *,
        spill: bool = False,
        waits: bool = False,
    ) -> Choice:
        """The number of parts with which a step takes the least seconds, and of several such numbers the
        smallest.

        Copies that have nothing to run beside (`alone_s`) are added to T; they only grow, so no more than T
        alone asks for.

        Args:
            parts: Of all blocks.
            busy: By everything else.
            hardware: Its links.
            fixed_bytes: Swapped in any case.
            host_bytes: Most that may lie on the host.
            spill: What is more than that goes on to SSD, else it is not swapped.
            waits: Compute waits for every copy.
        """
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
        count = least(cost, max(room, 0))
        if not waits:
            alone = alone_s(ranked[:count], hardware)
            count = min(range(count + 1), key=lambda each: cost(each) + alone[each])
        return cls(tuple(ranked), count, cost)

    def taken(self) -> Counter[int]:
        """By block, how many of its parts are swapped."""
        return Counter(each.block for each in self.parts[: self.count])
