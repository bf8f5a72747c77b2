"""Placement of multiplexed stages on ranks, and the time of a step.

Cross mapping: ranks under one root complex share its link, and the weights of consecutive stages are loaded
at about the same time. So neighbours are placed under different roots. Of all orders of the ranks, which then
repeat, the planner chooses the one of least contention; two stages under one root count as 1 / (distance of
the stages).

Source: Feng et al. 2023, Mobius (ASPLOS 23), sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import numpy as np

from memtune.offload.layer_major import StageLayout
from memtune.program import F64, I64


def contention(ranks: Sequence[int], per_root: int) -> float:
    """Return the contention of stages on `ranks`: the sum over pairs under one root of 1 / distance."""
    # `per_root` neighbouring ranks share a root complex. A pair on one rank never loads at once and
    # does not count.
    return sum(
        1.0 / (later - stage)
        for stage, one in enumerate(ranks)
        for later, other in enumerate(ranks[stage + 1 :], stage + 1)
        if one != other and one // per_root == other // per_root
    )


MOST_RANKS = 10
"""Largest number of ranks for which all orders are tried."""


@cache
def cross_mapping(stages: int, ranks: int, per_root: int) -> tuple[int, ...]:
    """Return the rank of each stage with the least contention; the order of `ranks` ranks repeats."""
    # Ranks of one root are interchangeable, so orders of roots are tried, each root's ranks in sequence.
    # Their number grows like a factorial: all are tried up to `MOST_RANKS`; beyond that roots alternate.
    if per_root <= 1 or per_root >= ranks:
        return tuple(stage % ranks for stage in range(stages))
    if ranks > MOST_RANKS:
        round_robin = sorted(range(ranks), key=lambda rank: (rank % per_root, rank))
        return tuple(round_robin[stage % ranks] for stage in range(stages))
    size = {root: min(per_root, ranks - root * per_root) for root in range(-(-ranks // per_root))}
    best: tuple[float, tuple[int, ...]] | None = None
    for roots in _orders(size, size):
        seen = [roots[:n].count(root) for n, root in enumerate(roots)]
        order = tuple(root * per_root + nth for root, nth in zip(roots, seen, strict=True))
        found = tuple(order[stage % ranks] for stage in range(stages))
        key = contention(found, per_root), found
        best = key if best is None or key < best else best
    assert best is not None
    return best[1]


def _orders(left: dict[int, int], size: dict[int, int]) -> Iterator[tuple[int, ...]]:
    """Yield all orders of roots, each as often as it has ranks; roots of one size are alike."""
    if not any(left.values()):
        yield ()
        return
    unused: set[int] = set()
    for root, count in left.items():
        # Unused roots of one size are alike: the first represents all, which removes equal orders.
        if not count or (count == size[root] and count in unused):
            continue
        if count == size[root]:
            unused.add(count)
        for rest in _orders({**left, root: count - 1}, size):
            yield (root, *rest)


@dataclass(frozen=True)
class BlockCosts:
    """Seconds of each block; compute is for one micro-batch."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    """Without recomputation."""
    load_s: Sequence[float]
    message_s: float
    """Seconds of a message from a stage to the next, through the hosts."""


def step_s(costs: BlockCosts, layout: StageLayout, micro_batches: int) -> float:
    """Return the seconds of a step under one layout; see `steps_s`."""
    bounds = np.array([[0, *(end for _, end in layout.stages)]])
    return float(steps_s(costs, bounds, layout.ranks, micro_batches, prefetch=layout.prefetch)[0])


def steps_s(
    costs: BlockCosts, bounds: I64, ranks: Sequence[int], micro_batches: int, *, prefetch: bool
) -> F64:
    """Return the seconds of a step under several partitions, simulated.

    Args:
        costs: Costs of the blocks.
        bounds: (p, stages + 1) the first block of each stage and the end of the last, of p partitions.
        ranks: Rank of each stage.
        micro_batches: Of all ranks.
        prefetch: The next stage's weights are prefetched while one computes.

    Returns:
        (p,) seconds.
    """
    # Each rank runs its uses in order: a micro-batch when its message has arrived, a stage when its
    # weights are loaded. With prefetch a stage's load starts when the use before it begins, otherwise
    # when that has ended.
    forward, backward, load = (
        stage_sums(each, bounds) for each in (costs.forward_s, costs.backward_s, costs.load_s)
    )
    n, last = bounds.shape[0], bounds.shape[1] - 2
    free, began, loaded = ({rank: np.zeros(n) for rank in ranks} for _ in range(3))
    resident: dict[int, int] = {}
    ready, nth = np.zeros((n, micro_batches)), np.arange(1, micro_batches + 1)
    for stage, is_restored in [
        *((s, False) for s in range(last + 1)),
        *((s, True) for s in range(last - 1, -1, -1)),
    ]:
        rank = ranks[stage]
        if resident.get(rank) != stage:
            loaded[rank] = np.maximum(loaded[rank], began[rank] if prefetch else free[rank]) + load[:, stage]
        # The turnaround leaves its stage resident, so its backward needs no load.
        resident[rank] = stage
        takes = forward[:, stage] + (backward[:, stage] if is_restored or stage == last else 0.0)
        may = np.maximum(free[rank], loaded[rank])
        began[rank] = np.maximum(may, ready[:, 0])
        # Closed form of a queue: micro-batch i ends after the micro-batch j <= i that it waited for last has
        # arrived and j..i have run; the maximum over j is a running maximum.
        waits = ready - takes[:, None] * (nth - 1)
        np.maximum(waits[:, 0], may, out=waits[:, 0])
        ends = np.maximum.accumulate(waits, 1) + takes[:, None] * nth
        free[rank], ready = ends[:, -1], ends + costs.message_s
    found: F64 = np.max(list(free.values()), axis=0)
    return found


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of each block; activations are those of one micro-batch."""

    weights: Sequence[int]
    gradients: Sequence[int]
    saved: Sequence[int]


def needed_bytes(sizes: BlockBytes, bounds: I64, ranks: Sequence[int], *, prefetch: bool) -> F64:
    """Return (p, ranks) the largest bytes of blocks on the device."""
    # A rank holds a stage, a prefetched one, and in backward gradients and activations. With prefetch a
    # stage's gradients are offloaded during the next stage.
    weights, gradients, saved = (
        stage_sums(each, bounds) for each in (sizes.weights, sizes.gradients, sizes.saved)
    )
    layout = StageLayout(tuple((n, n + 1) for n in range(len(ranks))), tuple(ranks), prefetch)
    most = np.zeros((len(bounds), max(ranks) + 1))
    for rank in range(most.shape[1]):
        uses = layout.uses(rank)
        before = None
        for use, following in zip_longest(uses, uses[1:]):
            need = weights[:, use.stage].copy()
            if prefetch and before is not None and before.kind != "forward":
                need += gradients[:, before.stage]
            before = use
            if prefetch and following is not None and following.stage != use.stage:
                need += weights[:, following.stage]
            if use.kind != "forward":
                # A forward run drops its saved tensors.
                need += gradients[:, use.stage] + saved[:, use.stage]
            most[:, rank] = np.maximum(most[:, rank], need)
    return most


def stage_sums(column: Sequence[float], bounds: I64) -> F64:
    """Return (p, stages) sums over the blocks of each stage."""
    found: F64 = np.diff(np.concatenate([[0.0], np.cumsum(np.asarray(column, np.float64))])[bounds], axis=1)
    return found
