"""Fastest partition of blocks into stages that share one device, with the next stage prefetched while one
computes.

Source: Feng et al. 2023, Mobius (ASPLOS 23), section 3.2: a mixed-integer program over layers and stages. On
one device, the cost of a partition is a sum over neighbouring stages, so a dynamic program over pairs of
stages is exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memtune.offload.layer_major import Span
from memtune.program import F64


@dataclass(frozen=True)
class StageCosts:
    """Costs of each block: seconds for all micro-batches of a step, activation bytes for one."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    """Without recomputation."""
    load_s: Sequence[float]
    weights: Sequence[int]
    gradients: Sequence[int]
    saved: Sequence[int]
    """Activation bytes that one micro-batch's backward needs."""

    @cached_property
    def _sums(self) -> tuple[F64, ...]:
        columns = (self.forward_s, self.backward_s, self.load_s, self.weights, self.gradients, self.saved)
        return tuple(np.concatenate([[0.0], np.cumsum(np.asarray(column, np.float64))]) for column in columns)

    def sums(self, first: int | npt.NDArray[np.intp], last: npt.NDArray[np.intp]) -> tuple[F64, ...]:
        """Return the costs of stages [first, last), summed over their blocks, in the order of the fields."""
        return tuple(column[last] - column[first] for column in self._sums)


def step_s(costs: StageCosts, stages: Sequence[Span]) -> float:
    """Return the seconds of a step: per phase the longer of compute and the load that overlaps with it."""
    # The last stage runs forward and backward at once; all others recompute forward in backward.
    found = _Stage.from_costs(costs, stages[0]).load
    for stage, following in itertools.pairwise(stages):
        one, other = _Stage.from_costs(costs, stage), _Stage.from_costs(costs, following)
        backward = other.forward + other.backward
        # In backward the order reverses: the earlier stage is the one that is prefetched.
        found += max(one.forward, other.load) + max(backward, one.load)
    first = _Stage.from_costs(costs, stages[0])
    return found + first.forward + first.backward


def memory_bytes(costs: StageCosts, stages: Sequence[Span]) -> int:
    """Return the largest bytes of weights, gradients and activations that are resident at once."""
    each = [_Stage.from_costs(costs, stage) for stage in stages]
    most = each[0].weights + each[0].gradients + each[0].saved
    for one, other in itertools.pairwise(each):
        # The most is in backward: the later stage runs while the earlier one is prefetched.
        most = max(most, one.weights + other.weights + other.gradients + other.saved)
    return int(most)


@dataclass(frozen=True)
class _Stage:
    forward: float
    backward: float
    load: float
    weights: float
    gradients: float
    saved: float

    @classmethod
    def from_costs(cls, costs: StageCosts, stage: Span) -> _Stage:
        return cls(*(float(column[0]) for column in costs.sums(stage[0], np.asarray([stage[1]]))))


def fastest_stages(
    costs: StageCosts, budget_bytes: float = np.inf, count: int | None = None
) -> tuple[Span, ...] | None:
    """Return the partition of smallest `step_s` whose `memory_bytes` are within the budget; None if there is
    none.

    Args:
        costs: Costs of the blocks.
        budget_bytes: Bytes for weights, gradients and activations.
        count: Number of stages; None: any.
    """
    blocks = len(costs.weights)
    if count is not None and not 1 <= count <= blocks:
        return None
    layers = count if count is not None else 1
    # State: number of stages so far (only if `count` is given), first block and end of the last stage.
    # Values: seconds, and the first block of the stage before.
    best = np.full((layers, blocks + 1, blocks + 1), np.inf)
    before = np.full((layers, blocks + 1, blocks + 1), -1, np.intp)
    _begin(best[0], costs, budget_bytes)
    # Ascending: every state that ends here was set by a smaller end.
    for end in range(1, blocks):
        following = np.arange(end + 1, blocks + 1)
        forward, backward, load, weights, gradients, saved = costs.sums(end, following)
        # (first, following): the stage before begins at any block below its end.
        own = [column[:, None] for column in costs.sums(np.arange(end), np.asarray(end))]
        own_forward, _, own_load, own_weights, *_ = own
        # This one's forward overlaps with the next one's load, the next one's backward with this one's.
        seconds = np.maximum(own_forward, load) + np.maximum(forward + backward, own_load)
        fits = own_weights + weights + gradients + saved <= budget_bytes
        for layer in range(layers if count is None else layers - 1):
            target = layer if count is None else layer + 1
            total = np.where(fits, best[layer, :end, end, None] + seconds, np.inf)
            first = total.argmin(axis=0)
            best[target, end, following] = total[first, following - end - 1]
            before[target, end, following] = first
    return _backtrack(best, before, count)


def _begin(best: F64, costs: StageCosts, budget_bytes: float) -> None:
    """Set the costs of a first stage: its load, and its backward, which runs last and waits for no load."""
    ends = np.arange(1, len(costs.weights) + 1)
    forward, backward, load, weights, gradients, saved = costs.sums(0, ends)
    best[0, ends] = np.where(weights + gradients + saved <= budget_bytes, load + forward + backward, np.inf)


def _backtrack(best: F64, before: npt.NDArray[np.intp], count: int | None) -> tuple[Span, ...] | None:
    blocks, layer = best.shape[1] - 1, best.shape[0] - 1
    first = int(np.argmin(best[layer, :, blocks]))
    if not np.isfinite(best[layer, first, blocks]):
        return None
    end, found = blocks, [(first, blocks)]
    while first > 0:
        first, end = int(before[layer, first, end]), first
        # Without a given count there is one layer, which all states share.
        layer -= count is not None
        found.append((first, end))
    return tuple(reversed(found))
