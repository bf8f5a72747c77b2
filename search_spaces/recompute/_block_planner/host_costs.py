"""Host seconds that the mechanisms of a plan cost, besides recomputed ops and copies.

A block that the activation table claims pays for its second run's bookkeeping and for a hook on each tensor
that autograd saves in it; if it keeps outputs or offloads chosen ones, also for a dispatch mode that sees
each op of it, views included. A schedule runs generated code instead: it pays for each call
and for each parameter's gradient, and nothing for an op. The constants are those of `Hardware`.

On a GPU the host issues ops ahead of the device, so its work costs time only in a step whose ops are shorter
than their issue.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np

from memtune.hardware import Hardware, op_costs
from memtune.program import I64, Kind, OpAddress, OpAddresses, Phase, Resource, Step

_WITH_VIEWS = 3
"""Ops that a dispatch mode sees for each op of a Step, in which views are dropped."""


class Claims(Protocol):
    """Claims of the activation table on a block."""

    @property
    def calls(self) -> OpAddresses | None:
        """Calls that a second run keeps and skips; None without one."""

    @property
    def moved(self) -> frozenset[OpAddress]:
        """Calls whose outputs are offloaded."""


def claims_s(step: Step, block: int, claims: Claims, hardware: Hardware) -> float:
    """Return the host seconds that `claims` on row `block` of the plain step add to a micro-batch."""
    if (claims.calls is None and not claims.moved) or not is_host_visible(step, hardware):
        return 0.0
    ops, saved = (int(counts[block]) for counts in _counts(step))
    found = hardware.recomputed_block_s + saved * hardware.saved_tensor_s
    if claims.calls is not None and claims.calls != OpAddresses():
        found += 2 * _WITH_VIEWS * ops * hardware.observed_op_s
    if claims.moved:
        found += _WITH_VIEWS * ops * hardware.observed_op_s + len(claims.moved) * hardware.moved_tensor_s
    return found


def schedule_s(step: Step, calls: int, hardware: Hardware) -> float:
    """Return the host seconds that schedules, run `calls` times a micro-batch, add to `step`."""
    # Its ops take no longer than in the plain model: generated code calls them below autograd.
    if not is_host_visible(step, hardware):
        return 0.0
    gradients = int((step.storages.kind == Kind.PARAMETER).sum())
    return calls * hardware.scheduled_call_s + gradients * hardware.scheduled_gradient_s


@lru_cache(maxsize=16)
def is_host_visible(step: Step, hardware: Hardware) -> bool:
    """Return whether work of the host takes time: on CPU always, on a GPU if ops mostly wait for it."""
    if hardware.device == "cpu":
        return True
    costs = op_costs(step, hardware)
    return float(costs.issue_s.sum()) > float(costs.op_s.sum())


@lru_cache(maxsize=16)
def _counts(step: Step) -> tuple[I64, I64]:
    """Return the (blocks,) number of forward ops of each block and of the tensors that it saves."""
    in_blocks = (
        (step.ops.block >= 0) & (step.ops.phase == Phase.FORWARD) & (step.ops.resource == Resource.COMPUTE)
    )
    blocks = len(step.blocks)
    ops = np.bincount(step.ops.block[in_blocks], minlength=blocks)
    saved = np.bincount(step.saves.block[step.saves.block >= 0], minlength=blocks)
    return ops.astype(np.int64), saved.astype(np.int64)
