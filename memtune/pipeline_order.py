"""In which order a rank of a pipeline runs forwards and backwards, as torch.distributed.pipelining does, and what stands idle.

p ranks, v stages on each (stage s on rank s mod p), m micro-batches, a multiple of p where they go in rounds. Source: Narayanan
et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, sections 2.2.1 and 2.2.2.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple

Schedule = Literal["1f1b", "interleaved_1f1b", "gpipe"]


class Action(NamedTuple):
    """A forward or backward of one micro-batch in one stage."""

    stage: int
    micro_batch: int
    backward: bool


def idle_share(ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Seconds that a rank waits over those that it works, with equal stages: (p - 1) / (v · m)."""
    return (ranks - 1) / (stages_per_rank * micro_batches)


def order(schedule: Schedule, rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[Action]:
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


def _in_turn(rank: int, ranks: int, stages_per_rank: int, micro_batches: int, *, backward: bool) -> list[Action]:
    """Forwards take a round of micro-batches through one stage after the other, backwards begin with the last stage."""
    in_a_round = micro_batches // max(1, micro_batches // ranks)
    seen: Counter[int] = Counter()
    found = []
    for step in range(stages_per_rank * micro_batches):
        nth = step // in_a_round % stages_per_rank
        stage = (stages_per_rank - 1 - nth if backward else nth) * ranks + rank
        found.append(Action(stage, seen[stage], backward))
        seen[stage] += 1
    return found
