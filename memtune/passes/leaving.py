"""Which of a block's saved tensors leave the device, when, and how much of each: Rules 1, 2 and 10 of `runtime.activations`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from memtune.byte_share import ByteShare
from memtune.calls import INPUTS, Call
from memtune.passes.calls import split_calls
from memtune.passes.recompute import calls_of
from memtune.pipeline_order import Stages
from memtune.program import FOREVER, I32, I64, Phase, Step, Tier


@dataclass(frozen=True)
class MoveClaim:
    """What one block gives to the host: a fraction of its claimable bytes, no tensor under `min_bytes`."""

    block: int
    fraction: float
    min_bytes: int = 0
    only: frozenset[Call] | None = None
    """Calls whose outputs are claimable, `INPUTS` for what the block was called with; None: everything is."""
    stays_on_host: bool = False
    """Does not go on where others go on to SSD."""


@dataclass(frozen=True)
class Leaving:
    """What leaves, in the order in which the copies start."""

    storage: I32
    block: I32
    """The one whose claim it is."""
    before: I32
    """Just before which op."""
    n_bytes: I64
    """What crosses the link: all of the storage, or the first bytes of one that is cut."""
    is_cut: npt.NDArray[np.bool_]
    is_output: npt.NDArray[np.bool_]
    """The op just before saved its own output."""


def leaving(step: Step, claims: list[MoveClaim], stages: Stages | None) -> Leaving:
    """What leaves by `claims`, of blocks that run once."""
    claim_of = {claim.block: claim for claim in claims if claim.fraction > 0}
    rows = _deciding_rows(step, claim_of, stages)
    storage, block = step.save_storage[rows], step.save_block[rows]
    share = {each: ByteShare[int](claim.fraction) for each, claim in claim_of.items()}
    columns = (range(len(rows)), block.tolist(), step.bytes[storage].tolist())
    whole = [nth for nth, of, n_bytes in zip(*columns, strict=True) if share[of].takes(nth, n_bytes)]
    cut = [rest for each in share.values() if (rest := each.rest()) is not None]
    chosen = np.asarray([*whole, *(nth for nth, _ in cut)], np.int32)
    n_bytes = np.concatenate([step.bytes[storage[whole]], np.asarray([each for _, each in cut], np.int64)]).astype(np.int64)
    late = np.arange(len(chosen)) >= len(whole)
    before = np.where(late, forward_end(step)[block[chosen]] + 1, step.save_before[rows[chosen]]).astype(np.int32)
    order = np.lexsort((late, block[chosen], before))  # a block's call ends before the next one's starts
    chosen, late, n_bytes = chosen[order], late[order], n_bytes[order]
    return Leaving(
        storage[chosen], block[chosen], before[order], n_bytes, n_bytes < step.bytes[storage[chosen]],
        (step.save_is_output[rows[chosen]] == 1) & ~late,
    )  # fmt: skip


@lru_cache(maxsize=64)
def claimable_bytes(step: Step, min_bytes: int, stages: Stages | None) -> tuple[int, ...]:
    """(blocks,) bytes of what each block is the first to save, in all of its calls, and may give away."""
    calls = split_calls(step)
    rows = _deciding_rows(calls, {block: MoveClaim(block, 1.0, min_bytes) for block in range(len(calls.blocks))}, stages)
    of = step.call_block[calls.save_block[rows]]
    found = np.bincount(of, weights=calls.bytes[calls.save_storage[rows]], minlength=len(step.blocks))
    return tuple(found.astype(np.int64).tolist())


def _deciding_rows(step: Step, claim_of: dict[int, MoveClaim], stages: Stages | None) -> I32:
    """The first save row of every storage that a claim may move, in the order in which forward saves them."""
    rows = claimable_rows(step)
    if stages is not None:
        stage, producer = stage_of(step, stages), step.producer[step.save_storage[rows]]
        rows = rows[(producer >= 0) & (stage[step.op_block[producer]] == stage[step.save_block[rows]])]
    least = np.full(len(step.blocks), FOREVER, np.int64)  # (blocks,) bytes of the smallest tensor that moves
    for block, claim in claim_of.items():
        least[block] = max(claim.min_bytes, 1)
    rows = rows[step.bytes[step.save_storage[rows]] >= least[step.save_block[rows]]]
    rows = rows[_named(step, rows, list(claim_of.values()))]
    _, first = np.unique(step.save_storage[rows], return_index=True)
    found: I32 = rows[np.sort(first)]
    return found


def claimable_rows(step: Step) -> I32:
    """Save rows of what may move (Rules 1 and 2 of `runtime.activations`), in the order in which forward saves them."""
    recomputed = (step.producer >= 0) & (step.op_phase[step.producer] == Phase.RECOMPUTE)
    claimable = ~recomputed & (step.held_until != FOREVER) & (step.tier == Tier.DEVICE)
    claimable[step.written_parts] = False
    rows = np.flatnonzero((step.save_block >= 0) & claimable[step.save_storage] & (step.save_until >= step.save_before))
    # A block's end comes before the next one's start.
    found: I32 = rows[np.lexsort((step.save_block[rows], step.save_before[rows]))].astype(np.int32)
    return found


def _named(step: Step, rows: I32, claims: list[MoveClaim]) -> npt.NDArray[np.bool_]:
    """(rows,) whether the claim of each save's block lets its storage move."""
    only = {claim.block: claim.only for claim in claims if claim.only is not None}
    if not only:
        return np.ones(len(rows), bool)
    forward = (step.op_phase == Phase.FORWARD) & np.isin(step.op_block, list(only))
    named = np.zeros(step.n_ops + 1, bool)  # the last entry serves what no op made
    for op, block, call in calls_of(step, np.flatnonzero(forward).astype(np.int32)):
        named[op] = call in (only[block] or ())
    inputs = set(zip(step.input_block.tolist(), step.input_storage.tolist(), strict=True))
    blocks, storages = step.save_block[rows], step.save_storage[rows]
    made_here = (step.producer[storages] >= 0) & (step.op_block[step.producer[storages]] == blocks)
    entered = [
        INPUTS in (only.get(block) or ()) and (block, storage) in inputs
        for block, storage in zip(blocks.tolist(), storages.tolist(), strict=True)
    ]
    free = ~np.isin(blocks, list(only))
    found: npt.NDArray[np.bool_] = free | (made_here & named[step.producer[storages]]) | (np.asarray(entered, bool) & ~made_here)
    return found


def forward_end(step: Step) -> I32:
    """(blocks,) last forward op of each block, -1 where there is none."""
    forward = (step.op_phase == Phase.FORWARD) & (step.op_block >= 0)
    end = np.full(len(step.blocks), -1, np.int32)
    np.maximum.at(end, step.op_block[forward], np.flatnonzero(forward).astype(np.int32))
    return end


def stage_of(step: Step, stages: Stages | None) -> I32:
    """(blocks + 1,) stage of each block, all one without stages; the last entry is for no block."""
    of = np.zeros(len(step.blocks), np.int32)
    if stages is not None:
        of = (np.searchsorted(np.asarray(stages.starts), np.arange(len(step.blocks)), side="right") - 1).astype(np.int32)
    return np.append(of, np.int32(-1))
