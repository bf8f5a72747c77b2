"""Pipeline schedules, in the order of torch.distributed.pipelining, and their idle share.

There are p ranks with v stages each (stage s is on rank s mod p) and m micro-batches; interleaved schedules
run micro-batches in rounds of p, so m is a multiple of p there. Source: Narayanan et al. 2021, Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, sections 2.2.1 and 2.2.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

PipelineSchedule = Literal["1f1b", "interleaved_1f1b", "gpipe"]


class StageAction(NamedTuple):
    """Forward or backward of one micro-batch in one stage."""

    stage: int
    micro_batch: int
    backward: bool


@dataclass(frozen=True)
class Stages:
    """Division of blocks among the ranks of a pipeline, while a step has the blocks of all ranks."""

    starts: tuple[int, ...]
    """First block of each stage; stage s is on rank s % ranks."""
    ranks: int
    schedule: PipelineSchedule
    in_slots: bool = False
    """Copies of saved activations run in the schedule's slots (`activations.offload.pipeline_slots`)."""

    @property
    def per_rank(self) -> int:
        """Stages on each rank."""
        return len(self.starts) // self.ranks

    def blocks(self, stage: int, n_blocks: int) -> range:
        """Return the blocks of a stage, out of `n_blocks`."""
        return range(self.starts[stage], (*self.starts, n_blocks)[stage + 1])

    def of_rank(self, rank: int) -> range:
        """Return the stages on a rank."""
        return range(rank, len(self.starts), self.ranks)

    def repeats(self, micro_batches: int) -> int:
        """Return how many times the unrolled rows repeat in a step of `micro_batches`."""
        # A few rounds of `ranks` micro-batches, at least two, suffice for the peak.
        if self.schedule == "gpipe":  # activations of all micro-batches are live at once
            return 1
        rounds = micro_batches // self.ranks
        return rounds // next((each for each in range(2, rounds + 1) if rounds % each == 0), 1)


def slots_between(actions: Sequence[StageAction]) -> dict[int, int]:
    """Return stage → the fewest actions that a rank runs between forward and backward of one micro-batch.

    Args:
        actions: The rank's actions, in order.
    """
    began = {(each.stage, each.micro_batch): n for n, each in enumerate(actions) if not each.backward}
    found: dict[int, int] = {}
    for n, each in enumerate(actions):
        if each.backward:
            between = n - began[each.stage, each.micro_batch] - 1
            found[each.stage] = min(between, found.get(each.stage, between))
    return found


def idle_share(ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Return the idle time of a rank divided by its busy time, with equal stages: (p - 1) / (v · m)."""
    return (ranks - 1) / (stages_per_rank * micro_batches)


def stage_actions(
    schedule: PipelineSchedule, rank: int, ranks: int, stages_per_rank: int, micro_batches: int
) -> list[StageAction]:
    """Return the actions of `rank`: forwards to fill the pipeline, pairs (1F1B), the last backwards."""
    total = stages_per_rank * micro_batches
    if schedule == "gpipe":
        warm_up, paired = total, 0
    elif schedule == "1f1b":
        warm_up = min(micro_batches, ranks - rank) - 1
        paired = total - warm_up
    else:
        # As torch's `ScheduleInterleaved1F1B`: rounds of all stages but the last, and two per later rank.
        per_round = micro_batches // max(1, micro_batches // ranks)
        warm_up = min((stages_per_rank - 1) * per_round + 2 * (ranks - 1 - rank), total)
        paired = total - warm_up
    forwards = _round_robin(rank, ranks, stages_per_rank, micro_batches, backward=False)
    backwards = _round_robin(rank, ranks, stages_per_rank, micro_batches, backward=True)
    pairs = [action for pair in zip(forwards[warm_up:], backwards[:paired], strict=True) for action in pair]
    return [*forwards[:warm_up], *pairs, *backwards[paired:]]


def _round_robin(
    rank: int, ranks: int, stages_per_rank: int, micro_batches: int, *, backward: bool
) -> list[StageAction]:
    """Return a rank's forwards, or backwards: a round of micro-batches per stage, stage by stage.

    Backwards begin with the last stage.
    """
    per_round = micro_batches // max(1, micro_batches // ranks)
    seen: Counter[int] = Counter()
    found = []
    for step in range(stages_per_rank * micro_batches):
        nth = step // per_round % stages_per_rank
        stage = (stages_per_rank - 1 - nth if backward else nth) * ranks + rank
        found.append(StageAction(stage, seen[stage], backward))
        seen[stage] += 1
    return found
