"""More stages than ranks: where each stage goes, and how long a step takes.

Cross mapping: ranks under one root complex share its link, and the weights of stages that follow one another come in at about the
same time. So neighbours go under different roots: of all orders of the ranks that repeat, the one of least contention, where two
stages under one root count as 1 over how many stages lie between their beginnings.

Source: Feng et al. 2023, Mobius (ASPLOS 23), sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from memtune.packs import OnRanks


def contention(ranks: Sequence[int], per_root: int) -> float:
    """Of stages on `ranks`, of which `per_root` neighbours share a root complex: the sum over pairs under one root, by distance.

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

    Which rank of a root is used does not matter, so orders of roots are tried, each rank of a root in its turn: all of them for
    `MOST_RANKS` at most, as their number grows like a factorial. Beyond that the roots take turns.
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
    """All orders of roots, of each as many as it has ranks; of unused roots of one size the first stands for all."""
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
    """Seconds of a step: each rank runs its uses in order, a micro-batch when it is there, a stage when its weights are.

    With prefetch a stage's weights begin to come in when the use before it begins, else when it has ended.
    """
    sums = [[sum(column[block] for block in layout.blocks(s)) for s in range(len(layout.stages))]
            for column in (costs.forward_s, costs.backward_s, costs.load_s)]  # fmt: skip
    forward, backward, load = sums
    last = len(layout.stages) - 1
    uses = [(stage, False) for stage in range(last + 1)] + [(stage, True) for stage in range(last - 1, -1, -1)]
    free, began, loaded = dict.fromkeys(layout.ranks, 0.0), dict.fromkeys(layout.ranks, 0.0), dict.fromkeys(layout.ranks, 0.0)
    there: dict[int, int] = {}
    ready = [0.0] * micro_batches
    for stage, is_back in uses:
        rank = layout.ranks[stage]
        if there.get(rank) != stage:
            loaded[rank] = max(loaded[rank], began[rank] if layout.prefetch else free[rank]) + load[stage]
        there[rank] = stage
        takes = forward[stage] + (backward[stage] if is_back or stage == last else 0.0)
        now = max(free[rank], loaded[rank])
        began[rank] = max(now, ready[0])
        for index in range(micro_batches):
            now = max(now, ready[index]) + takes
            ready[index] = now + costs.message_s
        free[rank] = now
    return max(free.values())
