"""Selection of the saved tensors that a block offloads, with the time and bytes of each.

It follows Rules 1, 2 and 10 of `activations.recompute.activation_table`. Runtime and pass share the running
sums that meet a share of a block's saved bytes exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from memtune.program import (
    FOREVER,
    I32,
    I64,
    INPUTS,
    OFFLOAD,
    OpAddress,
    Phase,
    SavedTensorPolicy,
    Stages,
    Step,
    Tier,
    calls_of,
    split_calls,
)

T = TypeVar("T")


class ByteShare(Generic[T]):
    """Running byte sums of one call of a block, which meet a share of its saved bytes exactly.

    A tensor is offloaded in full when it is saved if the offloaded bytes stay within the share of the bytes
    saved so far. At the end of the call the missing bytes are taken from the last tensor that was kept. It is
    large enough: it exceeded the missing bytes when it was saved, and tensors offloaded since then have not
    increased them.

    Args:
        fraction: Share of the bytes to offload, from 0 to 1; rounded to whole bytes.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._seen_bytes = self._offloaded_bytes = 0
        self._kept: T | None = None

    def _missing_bytes(self) -> int:
        return round(self._fraction * self._seen_bytes) - self._offloaded_bytes

    def is_offloaded_whole(self, tensor: T, n_bytes: int) -> bool:
        """Return whether `tensor`, which is being saved, is offloaded in full."""
        self._seen_bytes += n_bytes
        if n_bytes > self._missing_bytes():
            self._kept = tensor
            return False
        self._offloaded_bytes += n_bytes
        return True

    def partial_tensor(self) -> tuple[T, int] | None:
        """Return the tensor to cut at the end of the call and its bytes to offload, if bytes are missing."""
        missing = self._missing_bytes()
        return None if self._kept is None or not missing else (self._kept, missing)


@dataclass(frozen=True)
class OffloadClaim:
    """Claim of one block: a fraction of its claimable bytes, without tensors under `min_bytes`."""

    block: int
    fraction: float
    min_bytes: int = 0
    only: frozenset[OpAddress] | None = None
    """Calls whose outputs are claimable, `INPUTS` for the block's inputs; None: all saved tensors."""
    policy: SavedTensorPolicy = OFFLOAD


@dataclass(frozen=True)
class OffloadSelection:
    """The offloaded tensors, in the order in which their copies start."""

    storage: I32
    block: I32
    """The block whose claim offloads it."""
    before: I32
    """The op just before which the copy starts."""
    n_bytes: I64
    """Bytes that are packed: the whole storage, or the first bytes of a cut one."""
    is_cut: npt.NDArray[np.bool_]
    is_output: npt.NDArray[np.bool_]
    """The op just before saved its own output."""


def select_offloads(step: Step, claims: list[OffloadClaim], stages: Stages | None) -> OffloadSelection:
    """Return the tensors that `claims` offload, of blocks that run once each."""
    claim_of = {claim.block: claim for claim in claims if claim.fraction > 0}
    rows = _deciding_rows(step, claim_of, stages)
    storage, block = step.saves.storage[rows], step.saves.block[rows]
    # One running sum per block, as in the runtime's hook: which tensors fit depends on their order.
    share = {each: ByteShare[int](claim.fraction) for each, claim in claim_of.items()}
    columns = (range(len(rows)), block.tolist(), step.storages.bytes[storage].tolist())
    whole = [
        nth for nth, of, n_bytes in zip(*columns, strict=True) if share[of].is_offloaded_whole(nth, n_bytes)
    ]
    # At most one tensor per block is cut, so that the fraction is met exactly.
    cut = [rest for each in share.values() if (rest := each.partial_tensor()) is not None]
    chosen = np.asarray([*whole, *(nth for nth, _ in cut)], np.int32)
    n_bytes = np.concatenate(
        [step.storages.bytes[storage[whole]], np.asarray([each for _, each in cut], np.int64)]
    ).astype(np.int64)
    at_end = np.arange(len(chosen)) >= len(whole)  # cut tensors are offloaded at the end of the call
    before = np.where(
        at_end, forward_end(step)[block[chosen]] + 1, step.saves.packed_before[rows[chosen]]
    ).astype(np.int32)
    order = np.lexsort((at_end, block[chosen], before))  # a block's call ends before the next one's starts
    chosen, at_end, n_bytes = chosen[order], at_end[order], n_bytes[order]
    return OffloadSelection(
        storage[chosen],
        block[chosen],
        before[order],
        n_bytes,
        n_bytes < step.storages.bytes[storage[chosen]],
        (step.saves.is_output[rows[chosen]] == 1) & ~at_end,
    )


@lru_cache(maxsize=64)
def claimable_bytes(step: Step, min_bytes: int, stages: Stages | None) -> tuple[int, ...]:
    """Return (blocks,) bytes that each block is the first to save, in all of its calls, and may offload."""
    calls = split_calls(step)
    rows = _deciding_rows(
        calls, {block: OffloadClaim(block, 1.0, min_bytes) for block in range(len(calls.blocks))}, stages
    )
    of = step.calls.block[calls.saves.block[rows]]
    found = np.bincount(
        of, weights=calls.storages.bytes[calls.saves.storage[rows]], minlength=len(step.blocks)
    )
    return tuple(found.astype(np.int64).tolist())


def _deciding_rows(step: Step, claim_of: dict[int, OffloadClaim], stages: Stages | None) -> I32:
    """Return the first save row of each storage that a claim may offload, in save order."""
    rows = claimable_rows(step)
    if stages is not None:
        stage, producer = stage_of(step, stages), step.storages.producer[step.saves.storage[rows]]
        rows = rows[(producer >= 0) & (stage[step.ops.block[producer]] == stage[step.saves.block[rows]])]
    # (blocks,) bytes of the smallest tensor to pack; no tensor is as large as the initial value.
    least = np.full(len(step.blocks), np.iinfo(np.int64).max)
    largest = _largest_inputs(step).tolist()
    for block, claim in claim_of.items():
        least[block] = claim.policy.hops[0].least_bytes(claim.min_bytes, largest[block])
    rows = rows[step.storages.bytes[step.saves.storage[rows]] >= least[step.saves.block[rows]]]
    if claim_of:
        hop = next(iter(claim_of.values())).policy.hops[0]  # the same in all claims
        rows = rows[hop.accepts(step.storages.float_bytes[step.saves.storage[rows]])]
    rows = rows[_named(step, rows, list(claim_of.values()))]
    # A storage saved by several blocks belongs to the first; the others find it offloaded.
    _, first = np.unique(step.saves.storage[rows], return_index=True)
    found: I32 = rows[np.sort(first)]
    return found


def _largest_inputs(step: Step) -> I64:
    """Return (blocks,) bytes of the largest floating-point input of each block, 0 without one."""
    storage = step.calls.inputs.storage
    n_bytes = np.where(step.storages.float_bytes[storage] > 0, step.storages.bytes[storage], 0)
    found = np.zeros(len(step.blocks), np.int64)
    np.maximum.at(found, step.calls.input_block, n_bytes)
    return found


def claimable_rows(step: Step) -> I32:
    """Return the save rows that may be offloaded, in save order (Rules 1, 2 of the table)."""
    recomputed = (step.storages.producer >= 0) & (step.ops.phase[step.storages.producer] == Phase.RECOMPUTE)
    claimable = ~recomputed & (step.storages.held_until != FOREVER) & (step.storages.tier == Tier.DEVICE)
    # A copy of bytes that were never all written would be compared or read as if they were.
    claimable[step.partly_written] = False
    rows = np.flatnonzero(
        (step.saves.block >= 0)
        & claimable[step.saves.storage]
        & (step.saves.held_until >= step.saves.packed_before)
    )
    # A block's end comes before the next one's start.
    found: I32 = rows[np.lexsort((step.saves.block[rows], step.saves.packed_before[rows]))].astype(np.int32)
    return found


def _named(step: Step, rows: I32, claims: list[OffloadClaim]) -> npt.NDArray[np.bool_]:
    """Return (rows,) whether the claim of each save's block covers its storage."""
    only = {claim.block: claim.only for claim in claims if claim.only is not None}
    if not only:
        return np.ones(len(rows), bool)
    forward = (step.ops.phase == Phase.FORWARD) & np.isin(step.ops.block, list(only))
    named = np.zeros(step.ops.n + 1, bool)  # the last entry serves producer -1
    for op, block, call in calls_of(step, np.flatnonzero(forward).astype(np.int32)):
        named[op] = call in (only[block] or ())
    inputs = set(zip(step.calls.input_block.tolist(), step.calls.inputs.storage.tolist(), strict=True))
    blocks, storages = step.saves.block[rows], step.saves.storage[rows]
    made_here = (step.storages.producer[storages] >= 0) & (
        step.ops.block[step.storages.producer[storages]] == blocks
    )
    entered = [
        INPUTS in (only.get(block) or ()) and (block, storage) in inputs
        for block, storage in zip(blocks.tolist(), storages.tolist(), strict=True)
    ]
    free = ~np.isin(blocks, list(only))
    found: npt.NDArray[np.bool_] = (
        free
        | (made_here & named[step.storages.producer[storages]])
        | (np.asarray(entered, bool) & ~made_here)
    )
    return found


def forward_end(step: Step) -> I32:
    """Return (blocks,) the last forward op of each block, -1 for none."""
    forward = (step.ops.phase == Phase.FORWARD) & (step.ops.block >= 0)
    end = np.full(len(step.blocks), -1, np.int32)
    np.maximum.at(end, step.ops.block[forward], np.flatnonzero(forward).astype(np.int32))
    return end


def stage_of(step: Step, stages: Stages | None) -> I32:
    """Return (blocks + 1,) the stage of each block, 0 without stages; the last entry is for no block."""
    of = np.zeros(len(step.blocks), np.int32)
    if stages is not None:
        of = (
            np.searchsorted(np.asarray(stages.starts), np.arange(len(step.blocks)), side="right") - 1
        ).astype(np.int32)
    return np.append(of, np.int32(-1))
