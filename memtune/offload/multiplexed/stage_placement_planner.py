"""More stages than ranks: where each stage goes, and how long a step takes.

Cross mapping: ranks under one root complex share its link, and the weights of stages that follow one another
come in at about the same time. So neighbours go under different roots: of all orders of the ranks that
repeat, the one of least contention, where two stages under one root count as 1 over how many stages lie
between their beginnings.

Source: Feng et al. 2023, Mobius (ASPLOS 23), sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from memtune.offload.layer_major import OnRanks

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def contention(ranks: Sequence[int], per_root: int) -> float:
    """Of stages on `ranks`, of which `per_root` neighbours share a root complex: the sum over pairs under one
    root, by distance.

    A pair on one rank takes turns anyway, and does not count.
    """
    return sum(
        1.0 / (later - stage)
        for stage, one in enumerate(ranks)
        for later, other in enumerate(ranks[stage + 1 :], stage + 1)
        if one != other and one // per_root == other // per_root
    )


MOST_RANKS = 10
"""For which every order is tried."""


@cache
def cross_mapping(stages: int, ranks: int, per_root: int) -> tuple[int, ...]:
    """The rank of each stage under which stages in turn contend least; `ranks` of them repeat.

    Which rank of a root is used does not matter, so orders of roots are tried, each rank of a root in its
    turn: all of them for `MOST_RANKS` at most, as their number grows like a factorial. Beyond that the roots
    take turns.
    """
    if per_root <= 1 or per_root >= ranks:
        return tuple(stage % ranks for stage in range(stages))
    if ranks > MOST_RANKS:
        in_turn = sorted(range(ranks), key=lambda rank: (rank % per_root, rank))
        return tuple(in_turn[stage % ranks] for stage in range(stages))
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
    """All orders of roots, of each as many as it has ranks; of unused roots of one size the first stands for
    all.
    """
    if not any(left.values()):
        yield ()
        return
    unused: set[int] = set()
    for root, count in left.items():
        if not count or (count == size[root] and count in unused):
            continue
        if count == size[root]:
            unused.add(count)
        for rest in _orders({**left, root: count - 1}, size):
            yield (root, *rest)


@dataclass(frozen=True)
class TurnCosts:
    """Of each block and one micro-batch where it is compute."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    """Without running forward again."""
    load_s: Sequence[float]
    message_s: float
    """Of what passes from a stage to the next, by way of the hosts."""


def step_s(costs: TurnCosts, layout: OnRanks, micro_batches: int) -> float:
    """Seconds of a step under one layout, as `steps_s` says."""
    bounds = np.array([[0, *(end for _, end in layout.stages)]])
    return float(steps_s(costs, bounds, layout.ranks, micro_batches, prefetch=layout.prefetch)[0])


def steps_s(
    costs: TurnCosts, bounds: I64, ranks: Sequence[int], micro_batches: int, *, prefetch: bool
) -> F64:
    """Seconds of a step: each rank runs its uses in order, a micro-batch when it is there, a stage when its
    weights are.

    With prefetch a stage's weights begin to come in when the use before it begins, else when it has ended.

    Args:
        costs: Of the blocks.
        bounds: (p, stages + 1) the first block of each stage and the end of the last, of p partitions.
        ranks: Where each stage is.
        micro_batches: Of all ranks.
        prefetch: The next stage's weights come in while one computes.

    Returns:
        (p,) seconds.
    """
    forward, backward, load = (
        stage_sums(each, bounds) for each in (costs.forward_s, costs.backward_s, costs.load_s)
    )
    n, last = bounds.shape[0], bounds.shape[1] - 2
    free, began, loaded = ({rank: np.zeros(n) for rank in ranks} for _ in range(3))
    there: dict[int, int] = {}
    ready, nth = np.zeros((n, micro_batches)), np.arange(1, micro_batches + 1)
    for stage, is_back in [
        *((s, False) for s in range(last + 1)),
        *((s, True) for s in range(last - 1, -1, -1)),
    ]:
        rank = ranks[stage]
        if there.get(rank) != stage:
            loaded[rank] = np.maximum(loaded[rank], began[rank] if prefetch else free[rank]) + load[:, stage]
        there[rank] = stage
        takes = forward[:, stage] + (backward[:, stage] if is_back or stage == last else 0.0)
        may = np.maximum(free[rank], loaded[rank])
        began[rank] = np.maximum(may, ready[:, 0])
        # The i-th micro-batch ends when the last one that it waits for was there, and all from that one to
        # the i-th have run.
        waits = ready - takes[:, None] * (nth - 1)
        np.maximum(waits[:, 0], may, out=waits[:, 0])
        ends = np.maximum.accumulate(waits, 1) + takes[:, None] * nth
        free[rank], ready = ends[:, -1], ends + costs.message_s
    found: F64 = np.max(list(free.values()), axis=0)
    return found


@dataclass(frozen=True)
class TurnBytes:
    """Of each block; activations are those of one micro-batch."""

    weights: Sequence[int]
    gradients: Sequence[int]
    saved: Sequence[int]


def needed_bytes(sizes: TurnBytes, bounds: I64, ranks: Sequence[int], *, prefetch: bool) -> F64:
    """(p, ranks) most bytes of blocks on the device: a stage, what comes in beside it, and in backward what
    that makes.

    With prefetch a stage's gradients leave beside the next stage.
    """
    weights, gradients, saved = (
        stage_sums(each, bounds) for each in (sizes.weights, sizes.gradients, sizes.saved)
    )
    layout = OnRanks(tuple((n, n + 1) for n in range(len(ranks))), tuple(ranks), prefetch)
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
                need += gradients[:, use.stage] + saved[:, use.stage]
            most[:, rank] = np.maximum(most[:, rank], need)
    return most


def stage_sums(column: Sequence[float], bounds: I64) -> F64:
    """(p, stages) sums over the blocks of each stage."""
    found: F64 = np.diff(np.concatenate([[0.0], np.cumsum(np.asarray(column, np.float64))])[bounds], axis=1)
    return found
