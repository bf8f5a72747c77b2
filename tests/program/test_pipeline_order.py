"""Pipeline schedules, compared with torch's."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops, _get_warmup_ops

from memtune.program.pipeline_order import StageAction, idle_share, stage_actions


def torchs(rank: int, ranks: int, stages: int, micro_batches: int) -> list[StageAction]:
    """Return the actions of torch.distributed.pipelining.ScheduleInterleaved1F1B."""
    rounds = max(1, micro_batches // ranks)
    each = micro_batches // rounds
    warm_up = _get_warmup_ops(rank, stages, each, ranks, micro_batches)
    total = stages * micro_batches

    def forward(step: int) -> int:
        return step // each % stages * ranks + rank

    def backward(step: int) -> int:
        return (stages - 1 - (step - warm_up) // each % stages) * ranks + rank

    found = _get_1f1b_rank_ops(stages, ranks, warm_up, total - warm_up, warm_up, rank, forward, backward)
    return [
        StageAction(a.stage_index, a.microbatch_index, a.computation_type.name == "FULL_BACKWARD")
        for a in found
        if a is not None
    ]


@pytest.mark.parametrize(
    ("ranks", "stages", "micro_batches"), [(2, 2, 4), (4, 2, 4), (4, 3, 8), (3, 2, 9), (2, 4, 2)]
)
def test_stage_actions_interleaved_equal_torch(ranks: int, stages: int, micro_batches: int) -> None:
    for rank in range(ranks):
        assert stage_actions("interleaved_1f1b", rank, ranks, stages, micro_batches) == torchs(
            rank, ranks, stages, micro_batches
        )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stage_actions_run_each_micro_batch_once_in_order(schedule: str) -> None:
    for rank in range(4):
        found = stage_actions(schedule, rank, 4, 1, 6)  # type: ignore[arg-type]
        for backward in (False, True):
            assert [a for a in found if a.backward == backward] == [
                StageAction(rank, i, backward) for i in range(6)
            ]
        on_the_way = [sum(1 - 2 * a.backward for a in found[: at + 1]) for at in range(len(found))]
        assert max(on_the_way) == (6 if schedule == "gpipe" else 4 - rank)


def test_idle_share_of_interleaved_schedule() -> None:
    assert idle_share(4, 2, 6) == 3 / 12
