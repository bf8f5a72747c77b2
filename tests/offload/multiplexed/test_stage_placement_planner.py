"""Placement of stages against all orders of ranks, and the time of a step."""

from __future__ import annotations

import itertools

import pytest

from memtune.offload.layer_major.packs import Span, StageLayout
from memtune.offload.multiplexed.stage_placement_planner import BlockCosts, contention, cross_mapping, step_s


@pytest.mark.parametrize("ranks", range(2, 7))
@pytest.mark.parametrize("per_root", [1, 2, 3, 4])
def test_cross_mapping_has_the_least_contention_of_all_orders(ranks: int, per_root: int) -> None:
    for rounds in (1, 2, 3):
        stages = ranks * rounds
        found = cross_mapping(stages, ranks, per_root)
        least = min(
            contention([p[s % ranks] for s in range(stages)], per_root)
            for p in itertools.permutations(range(ranks))
        )
        assert contention(found, per_root) == pytest.approx(least)
        assert sorted(found) == sorted([*range(ranks)] * rounds)
        assert found == found[:ranks] * rounds


def test_cross_mapping_puts_neighbours_under_different_roots() -> None:
    """The paper's servers: four GPUs under two roots, and eight."""
    for ranks in (4, 8):
        found = cross_mapping(2 * ranks, ranks, ranks // 2)
        assert all(one // (ranks // 2) != other // (ranks // 2) for one, other in itertools.pairwise(found))
        assert contention(found, ranks // 2) < contention(
            [stage % ranks for stage in range(2 * ranks)], ranks // 2
        )


def costs(load_s: float, message_s: float = 0.0) -> BlockCosts:
    return BlockCosts([1.0] * 8, [2.0] * 8, [load_s] * 8, message_s)


def layout(stages: int, prefetch: bool = True) -> StageLayout:
    spans: tuple[Span, ...] = tuple((n * 8 // stages, (n + 1) * 8 // stages) for n in range(stages))
    return StageLayout(spans, tuple(stage % 2 for stage in range(stages)), prefetch)


def test_step_s_is_compute_and_bubbles_if_links_are_free() -> None:
    """Two ranks, each with half of 8 forwards, 7 or 6 recomputed forwards and 8 backwards, of four
    micro-batches, plus waits.
    """
    for stages in (2, 4, 8):
        takes = step_s(costs(0.0), layout(stages), 4)
        work = 4 * (8 + 16 + (8 - 8 / stages)) / 2
        assert work <= takes <= work + 8 / stages * (1 + 2 + 2)


def test_step_s_hides_loads_that_are_shorter_than_compute() -> None:
    free = step_s(costs(0.0), layout(4), 4)
    hidden, waited = (step_s(costs(1.0), layout(4, prefetch), 4) for prefetch in (True, False))
    assert hidden <= free + 2 * 2.0  # the first stage of each rank
    assert waited > hidden
    assert step_s(costs(50.0), layout(4), 4) > 3 * free


@pytest.mark.parametrize(
    ("spans", "ranks"),
    [(((0, 2), (3, 4)), (0, 1)), (((0, 2), (2, 4)), (0, 0)), (((0, 2), (2, 4)), (0,)), ((), ())],
)
def test_stage_layout_refuses_gaps_and_neighbours_on_one_rank(
    spans: tuple[Span, ...], ranks: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="follow one another"):
        StageLayout(spans, ranks)
