"""Rules, pass and apply of techniques that run packs of blocks over all micro-batches.

The order is in `offload.layer_major.layer_major_order`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from memtune import refusals
from memtune.offload.layer_major import (
    BoundaryTier,
    LayerMajor,
    PackOffloader,
    Packs,
    Span,
    layer_major,
    not_a_chain,
)
from memtune.offload.optimizer import HostOptimizer, Native, optimizer_on_host
from memtune.parallel.ranks import require_ranks
from memtune.program import Program, memoized
from memtune.runtime import Context
from memtune.search_spaces._support import conflict
from memtune.search_spaces.offload.states._common.layer_rules import cannot_run
from memtune.technique import Plan, Reason, Target, Technique


class PacksPlan(Plan):
    """Packs of neighbouring blocks, each as its first block and the one after its last."""

    forward: tuple[Span, ...]
    """Packs of forward, of all blocks before the last pack of backward."""
    backward: tuple[Span, ...]
    """Packs of backward, of all blocks, in forward order."""

    @model_validator(mode="after")
    def _is_a_chain(self) -> Self:
        self.packs()
        return self

    def packs(self, **settings: Any) -> Packs:
        """Return the packs, with other `settings` of `memtune.offload.layer_major.packs.Packs`."""
        return Packs(self.forward, self.backward, **settings)


_TRIES = 4
"""Rewrites that test whether a plan made from sums of sizes stays within the budget."""
T = TypeVar("T")
F64 = npt.NDArray[np.float64]


def cannot_run_packs(
    technique: Technique, program: Program, target: Target, *, alone: bool = True
) -> Reason | None:
    """Return why the blocks of `program` cannot be run pack by pack over all micro-batches.

    `alone`: on one rank only, not with ranks that do the same.
    """
    slots = ("recompute", "offload.activations", "split", "sharding.states", "sharding.parallel")
    if (reason := conflict(technique, target, *slots)) is not None:
        return reason
    if (reason := cannot_run(program, target, alone=alone)) is not None:
        return reason
    if (why := not_a_chain(program.step)) != "":
        return Reason(why, "offload: {states: {kind: stronghold}}")
    return None


@memoized
def in_packs(program: Program, packs: Packs, boundaries: BoundaryTier) -> Program:
    """Return the program of a whole step in layer-major order, with all its micro-batches in one body."""
    step = layer_major(program.step, packs, program.accumulate, boundaries, program.ranks)
    samples = program.micro_batch * program.accumulate
    return program.with_step(optimizer_on_host(step, Native()), micro_batch=samples, accumulate=1)


def within_budget(
    solve: Callable[[F64], T | None],
    needed: Callable[[T], F64],
    peaks: Callable[[T], F64],
    budget_bytes: int,
    ranks: int = 1,
) -> T | None:
    """Return the plan that `solve` finds and the pass confirms; None if a few tries find none.

    Args:
        solve: Maps the room for blocks on each rank to the best plan by sums of sizes; None if there is none.
        needed: Maps a plan to (ranks,) that sum.
        peaks: Maps a plan to (ranks,) peaks of the rewritten step.
        budget_bytes: Budget of each rank.
        ranks: Ranks with a room of their own.
    """
    # Sums of sizes omit other bytes on the device, which only the pass knows. So the room of a rank
    # whose peak exceeds the budget becomes its needed bytes less the excess, and `solve` runs again.
    room = np.full(ranks, float(budget_bytes))
    for _ in range(_TRIES):
        found = solve(room)
        if found is None:
            return None
        over = peaks(found) - budget_bytes
        if (over <= 0).all():
            return found
        room = np.where(over > 0, np.minimum(room, needed(found) - over), room)
    return None


def apply_packs(context: Context, packs: Packs, boundaries: BoundaryTier, kind: str) -> None:
    """Move the optimizer and the blocks' parameters to the host, and have `Tuned.step` run pack by pack.

    Raises:
        ApplyError: The packs are for another number of blocks, or the ranks' weights differ, or as
            `offload.layer_major.layer_major_order` and `offload.layer_major.pack_offloader` raise.
    """
    if packs.blocks != len(context.blocks):
        raise refusals.plan_of_other_model(
            f"offload.states: {{kind: {kind}}}",
            f"It has packs of {packs.blocks} blocks, the model has {len(context.blocks)}.",
        )
    if context.placement.world_size > 1:
        require_ranks(context, kind)  # each rank keeps all weights on its host, so they must be equal
    store = PackOffloader(context, HostOptimizer(context, "native"), deferred=frozenset(packs.deferred))
    order = LayerMajor(context, store, packs, boundaries)
    context.loop.order = order
    context.checks["offload.states"] = lambda: store.check() | order.check()
