"""What techniques share that run packs of blocks over all micro-batches
(`offload.layer_major.layer_major_order`): what fits, pass, how it is applied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import model_validator

from memtune.errors import ApplyError
from memtune.offload.layer_major import LayerMajor, Packs, PackStore, Span, Where, layer_major, not_a_chain
from memtune.offload.optimizer import HostOptimizer, Native, optimizer_on_host
from memtune.parallel.ranks import require_ranks
from memtune.program import Kind, Program, Step, columns_of, remembered
from memtune.runtime import Context
from memtune.search_spaces._support import conflict
from memtune.search_spaces.offload.states._common.layer_offload import cannot_run
from memtune.technique import Plan, Reason, Target, Technique


class PacksPlan(Plan):
    """Packs of neighbouring blocks, each with its first block and the one after its last."""

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
"""Whole rewrites of a plan: what sums of sizes promise is confirmed by the pass."""
T = TypeVar("T")
F64 = npt.NDArray[np.float64]


def not_in_packs(
    technique: Technique, program: Program, target: Target, *, alone: bool = True
) -> Reason | None:
    """Why the blocks of `program` cannot be run pack by pack over all micro-batches, `alone` or with ranks
    that do the same.
    """
    slots = ("recompute", "offload.activations", "split", "sharding.states", "sharding.parallel")
    if (reason := conflict(technique, target, *slots)) is not None:
        return reason
    if (reason := cannot_run(program, target, alone=alone)) is not None:
        return reason
    if (why := not_a_chain(program.step)) != "":
        return Reason(why, "offload: {states: {kind: stronghold}}")
    return None


class BlockBytes(NamedTuple):
    """What each block needs, and what is there beside them."""

    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    saved: tuple[int, ...]
    """By one micro-batch, for its backward."""
    boundary: int
    """The largest of what a block starts from, in one micro-batch."""
    beside: int
    """All else that is there at the peak of a plain step: an upper bound."""


@functools.lru_cache(maxsize=32)
def block_bytes(step: Step) -> BlockBytes:
    """Sizes of the blocks of `step`."""
    columns, n_blocks = columns_of(step.parameters), len(step.blocks)
    n_bytes, inside = columns.numel * columns.itemsize, columns.block >= 0
    weights = np.bincount(columns.block[inside], n_bytes[inside], n_blocks).astype(np.int64)
    trained = inside & (columns.gradient >= 0)
    gradients = np.bincount(columns.block[trained], n_bytes[trained], n_blocks).astype(np.int64)
    given = [step.calls.inputs.storage[step.calls.inputs.call == i] for i in range(n_blocks)]
    boundary = max(int(step.storages.bytes[each[step.storages.producer[each] >= 0]].sum()) for each in given)
    saved = tuple(step.saved_bytes(i) for i in range(n_blocks))
    state = int(step.storages.bytes[(step.storages.kind == Kind.OPTIMIZER) & (step.storages.tier == 0)].sum())
    beside = step.peak_bytes() - int(weights.sum() + gradients.sum()) - sum(saved) - state
    return BlockBytes(tuple(weights.tolist()), tuple(gradients.tolist()), saved, boundary, max(beside, 0))


@remembered
def in_packs(program: Program, packs: Packs, boundaries: Where) -> Program:
    """The program of a whole step in layer-major order: all its micro-batches are in one body."""
    step = layer_major(program.step, packs, program.accumulate, boundaries, program.ranks)
    whole = program.micro_batch * program.accumulate
    return program.with_step(optimizer_on_host(step, Native()), micro_batch=whole, accumulate=1)


def within_budget(
    solve: Callable[[F64], T | None],
    needed: Callable[[T], F64],
    peaks: Callable[[T], F64],
    budget_bytes: int,
    ranks: int = 1,
) -> T | None:
    """What `solve` finds and the pass confirms, None where a few tries lead to nothing.

    Sums of sizes leave out what else is on the device, and what that comes to the pass says: the room of a
    rank whose peak is above the budget becomes what was needed less what was too much.

    Args:
        solve: From the room for blocks on each rank, the best that sums of sizes promise; None where there is
            none.
        needed: (ranks,) that sum.
        peaks: (ranks,) peaks of the rewritten step.
        budget_bytes: Of each rank.
        ranks: Whose room differs.
    """
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


def apply_packs(context: Context, packs: Packs, boundaries: Where, kind: str) -> None:
    """Move the optimizer and the blocks' parameters to the host, and have `Tuned.step` run pack by pack.

    Raises:
        ApplyError: The packs are for another number of blocks, the ranks' weights differ, or what
            `offload.layer_major.layer_major_order` and `offload.layer_major.pack_offloader` raise.
    """
    if packs.blocks != len(context.blocks):
        raise ApplyError(
            f"offload.states: {{kind: {kind}}} has no packs for {len(context.blocks)} blocks.",
            evidence=f"The plan was made for {packs.blocks}.",
            fix="memtune search, which writes them with the config; memtune trial finds them for itself",
            code="MT364",
        )
    if context.placement.world_size > 1:
        require_ranks(context, kind)
    store = PackStore(context, HostOptimizer(context, "native"), late=frozenset(packs.late))
    order = LayerMajor(context, store, packs, boundaries)
    context.loop.order = order
    context.checks["offload.states"] = lambda: store.check() | order.check()


def backward_packs(plan: Any, blocks: int) -> tuple[Span, ...]:
    """Return the packs that run backward, as `Effects.packs` has them."""
    found: tuple[Span, ...] = plan.spans if hasattr(plan, "spans") else plan.backward
    return found
