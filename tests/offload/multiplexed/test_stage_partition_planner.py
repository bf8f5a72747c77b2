"""Fastest partition into multiplexed stages, against all partitions, each simulated use by use with
micro-batches one by one.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from memtune.offload.layer_major.packs import StageLayout
from memtune.offload.multiplexed.stage_partition_planner import Partitions
from memtune.offload.multiplexed.stage_placement_planner import BlockBytes, BlockCosts, step_s

Drawn = tuple[BlockCosts, BlockBytes, int, int]


def drawn(seed: int, blocks: tuple[int, int] = (5, 9)) -> Drawn:
    """Costs and sizes of some blocks, ranks and micro-batches."""
    rng = np.random.default_rng(seed)
    n, ranks = int(rng.integers(*blocks)), int(rng.integers(2, 4))
    forward, size = rng.uniform(0.5, 1.5, n), rng.integers(5, 15, n)
    costs = BlockCosts(
        forward.tolist(), (2 * forward).tolist(), rng.uniform(0, 8, n).tolist(), float(rng.uniform(0, 0.5))
    )
    return (
        costs,
        BlockBytes(size.tolist(), size.tolist(), (3 * size).tolist()),
        ranks,
        ranks * int(rng.integers(1, 4)),
    )


def mapping(ranks: int) -> dict[int, tuple[int, ...]]:
    return {count: tuple(stage % ranks for stage in range(count)) for count in range(1, 40)}


def simulated_s(costs: BlockCosts, layout: StageLayout, micro_batches: int) -> float:
    """Seconds of a step, use by use and micro-batch by micro-batch."""
    last = len(layout.stages) - 1
    free, began, loaded = (dict.fromkeys(layout.ranks, 0.0) for _ in range(3))
    there: dict[int, int] = {}
    ready = [0.0] * micro_batches
    for stage, back in [
        *((s, False) for s in range(last + 1)),
        *((s, True) for s in range(last - 1, -1, -1)),
    ]:
        rank, blocks = layout.ranks[stage], layout.blocks(stage)
        if there.get(rank) != stage:
            loaded[rank] = max(loaded[rank], began[rank] if layout.prefetch else free[rank]) + sum(
                costs.load_s[b] for b in blocks
            )
        there[rank] = stage
        takes = sum(costs.forward_s[b] + (back or stage == last) * costs.backward_s[b] for b in blocks)
        now = max(free[rank], loaded[rank])
        began[rank] = max(now, ready[0])
        for index in range(micro_batches):
            now = max(now, ready[index]) + takes
            ready[index] = now + costs.message_s
        free[rank] = now
    return max(free.values())


def most_bytes(sizes: BlockBytes, layout: StageLayout, rank: int) -> int:
    """Largest bytes of the stages of a rank, use by use."""
    of = [
        {name: sum(column[b] for b in layout.blocks(s)) for name, column in vars(sizes).items()}
        for s in range(len(layout.stages))
    ]
    most, uses = 0, layout.uses(rank)
    for before, use, following in zip([None, *uses[:-1]], uses, [*uses[1:], None], strict=True):
        need = of[use.stage]["weights"]
        if layout.prefetch and following is not None and following.stage != use.stage:
            need += of[following.stage]["weights"]
        if layout.prefetch and before is not None and before.kind != "forward":
            need += of[before.stage]["gradients"]  # in D2H copies during this use
        most = max(
            most, need + (use.kind != "forward") * (of[use.stage]["gradients"] + of[use.stage]["saved"])
        )
    return most


def every_layout(blocks: int, ranks: int, *, prefetch: bool) -> list[StageLayout]:
    found = []
    for count in range(ranks, blocks + 1, ranks):
        for inner in itertools.combinations(range(1, blocks), count - 1):
            spans = tuple(itertools.pairwise((0, *inner, blocks)))
            found.append(StageLayout(spans, mapping(ranks)[count], prefetch))
    return found


@pytest.mark.parametrize("prefetch", [True, False])
def test_steps_s_equals_a_simulation_of_uses(prefetch: bool) -> None:
    for seed in range(5):
        costs, sizes, ranks, micro_batches = drawn(seed)
        layouts = every_layout(len(costs.forward_s), ranks, prefetch=prefetch)
        each = Partitions(
            costs, sizes, range(1, len(costs.forward_s)), micro_batches, mapping(ranks).__getitem__, prefetch
        )
        for layout in layouts[::7]:
            assert step_s(costs, layout, micro_batches) == pytest.approx(
                simulated_s(costs, layout, micro_batches)
            )
            assert each.needed(layout).tolist() == [most_bytes(sizes, layout, rank) for rank in range(ranks)]


@pytest.mark.parametrize("seed", range(12))
def test_fastest_partition_is_the_fastest_that_fits(seed: int) -> None:
    costs, sizes, ranks, micro_batches = drawn(seed)
    blocks = len(costs.forward_s)
    room = np.random.default_rng(seed).uniform(8, 25, ranks) * np.mean(sizes.weights)
    each = Partitions(costs, sizes, range(1, blocks), micro_batches, mapping(ranks).__getitem__)
    counts = range(ranks, blocks + 1, ranks)
    found = each.fastest(counts, room)
    fit = [
        layout
        for layout in every_layout(blocks, ranks, prefetch=True)
        if all(most_bytes(sizes, layout, rank) <= room[rank] for rank in range(ranks))
    ]
    assert (found is None) == (not fit)
    if found is not None:
        least = min(simulated_s(costs, layout, micro_batches) for layout in fit)
        assert simulated_s(costs, found, micro_batches) == pytest.approx(least)


def test_partition_search_is_close_to_the_fastest() -> None:
    """Rule 2 alone: most often the same partition, never far off."""
    same = 0
    for seed in range(20):
        costs, sizes, ranks, micro_batches = drawn(seed, (8, 12))
        cuts, room = range(1, len(costs.forward_s)), np.full(ranks, np.inf)
        takes = []
        for most in (20_000_000, 0):
            each = Partitions(
                costs, sizes, cuts, micro_batches, mapping(ranks).__getitem__, evaluated_max=most
            )
            found = each.fastest(range(ranks, len(cuts) + 2, ranks), room)
            assert found is not None
            takes.append(step_s(costs, found, micro_batches))
        assert takes[1] <= 1.06 * takes[0]
        same += takes[1] == pytest.approx(takes[0])
    assert same >= 16


def test_partitions_begin_stages_at_cuts_only() -> None:
    costs, sizes, _, _ = drawn(0, (8, 9))
    each = Partitions(costs, sizes, (2, 5, 6), 4, mapping(2).__getitem__)
    room = np.full(2, np.inf)
    assert each.smallest([2, 4, 6]).stages == ((0, 2), (2, 5), (5, 6), (6, 8))
    found = each.fastest([2, 4, 6], room)
    assert found is not None
    assert {end for _, end in found.stages} <= {2, 5, 6, 8}
