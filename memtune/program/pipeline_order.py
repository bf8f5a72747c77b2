"""In which order a rank of a pipeline runs forwards and backwards, as torch.distributed.pipelining does, and
what stands idle.

p ranks, v stages on each (stage s on rank s mod p), m micro-batches, a multiple of p where they go in rounds.
Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM, sections 2.2.1 and 2.2.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

PipelineSchedule = Literal["1f1b", "interleaved_1f1b", "gpipe"]


class StageAction(NamedTuple):
    """A forward or backward of one micro-batch in one stage."""

    stage: int
    micro_batch: int
    backward: bool


@dataclass(frozen=True)
class Stages:
    """How blocks are divided among the ranks of a pipeline, known while a step still is that of all of
    them.
    """

    starts: tuple[int, ...]
    """The first block of each stage; stage s is on rank s % ranks."""
    ranks: int
    schedule: PipelineSchedule
    in_slots: bool = False
    """Copies of saved activations follow the schedule's slots (`activations.offload.pipeline_slots`)."""

    @property
    def per_rank(self) -> int:
        """Stages on each rank."""
        return len(self.starts) // self.ranks

    def blocks(self, stage: int, n_blocks: int) -> range:
        """The blocks of a stage, of `n_blocks` in all."""
        return range(self.starts[stage], (*self.starts, n_blocks)[stage + 1])

    def of_rank(self, rank: int) -> range:
        """The stages on a rank."""
        return range(rank, len(self.starts), self.ranks)

    def times(self, micro_batches: int) -> int:
        """How often written rows stand for rounds of `ranks` micro-batches: two rounds or a few show what is
        held.
        """
        if self.schedule == "gpipe":  # all of them are held
            return 1
        rounds = micro_batches // self.ranks
        return rounds // next((each for each in range(2, rounds + 1) if rounds % each == 0), 1)


def slots_between(actions: Sequence[StageAction]) -> dict[int, int]:
    """Stage → the fewest forwards and backwards of others that a rank runs between a micro-batch's forward
    and its backward.

    Args:
        actions: What the rank runs, in order.
    """
    began = {(each.stage, each.micro_batch): n for n, each in enumerate(actions) if not each.backward}
    found: dict[int, int] = {}
    for n, each in enumerate(actions):
        if each.backward:
            between = n - began[each.stage, each.micro_batch] - 1
            found[each.stage] = min(between, found.get(each.stage, between))
    return found


def idle_share(ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Seconds that a rank waits over those that it works, with equal stages: (p - 1) / (v · m)."""
    return (ranks - 1) / (stages_per_rank * micro_batches)


def order(
    schedule: PipelineSchedule, rank: int, ranks: int, stages_per_rank: int, micro_batches: int
) -> list[StageAction]:
    """What `rank` runs, in order."""
    total = stages_per_rank * micro_batches
    if schedule == "gpipe":
        ahead, together = total, 0
    elif schedule == "1f1b":
        ahead = min(micro_batches, ranks - rank) - 1
        together = total - ahead
    else:
        in_a_round = micro_batches // max(1, micro_batches // ranks)
        ahead = min((stages_per_rank - 1) * in_a_round + 2 * (ranks - 1 - rank), total)
        together = total - ahead
    forwards = _in_turn(rank, ranks, stages_per_rank, micro_batches, backward=False)
    backwards = _in_turn(rank, ranks, stages_per_rank, micro_batches, backward=True)
    pairs = [action for pair in zip(forwards[ahead:], backwards[:together], strict=True) for action in pair]
    return [*forwards[:ahead], *pairs, *backwards[together:]]


def _in_turn(
    rank: int, ranks: int, stages_per_rank: int, micro_batches: int, *, backward: bool
) -> list[StageAction]:
    """Forwards take a round of micro-batches through one stage after the other, backwards begin with the last
    stage.
    """
    in_a_round = micro_batches // max(1, micro_batches // ranks)
    seen: Counter[int] = Counter()
    found = []
    for step in range(stages_per_rank * micro_batches):
        nth = step // in_a_round % stages_per_rank
        stage = (stages_per_rank - 1 - nth if backward else nth) * ranks + rank
        found.append(StageAction(stage, seen[stage], backward))
        seen[stage] += 1
    return found
