"""Pattern over a step: cuts between blocks at which a pipeline may be divided, and the stage of each op.

Every op of forward and backward has a *place*: before the blocks (1), in block i (2i + 2), between block i
and the next (2i + 3), after the last of n blocks (2n + 1). A cut before block c is at 2c + 1, and is valid
exactly if one tensor of the size of the first block's input crosses it:

1. Each block runs once per micro-batch, in order.
2. Ops after the cut read only one tensor computed before it, the last output of block c - 1; code between
  blocks that uses such values cannot be cut, since the stage before ends with its block and the next one
  begins with its own.
3. Values that depend on no weight (masks, positions) are computed by every stage from its own copy of the
  batch, and cross no cut.
4. No block before the cut returns a second tensor: a later stage, on which the block does not run, recreates
  its output around the tensor that was sent (`block_outputs`).
5. Backward crosses the cut with one gradient; a weight used on both sides gets its gradient in two parts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from memtune.program import (
    I32,
    READS,
    Mask,
    Phase,
    Resource,
    Step,
    Tier,
    columns_of,
)
from memtune.workload import not_one_tensor

SHARED = 0
"""Place of ops before the blocks that every stage runs."""
PREFIX = 1
_UPLOAD = "memtune.to_device.default"


@dataclass(frozen=True, eq=False)
class Chain:
    """A step whose blocks form a chain."""

    place: I32  # (n,) of each op of forward and backward, -1 for all others
    cuts: tuple[int, ...]
    """Blocks before which the chain may be cut."""
    passed_bytes: int
    """Bytes that cross a cut in forward, and in backward."""
    boundary: dict[int, int]
    """Cut → the storage that crosses it."""
    first: tuple[str, ...]
    """Parameters outside of the blocks that run before them."""
    last: tuple[str, ...]
    """The same for parameters used after the blocks."""
    outputs: tuple[str, ...]
    """Output structure of each block (`block_outputs`); empty if all return a single tensor."""
    obstacle: str
    """The obstacle at the first place that cannot be cut, '' for none."""


@functools.lru_cache(maxsize=8)
def chain_of(step: Step) -> Chain | str:
    """Return the chain of a plain step's blocks, or the reason why they form none."""
    n_blocks = len(step.blocks)
    if n_blocks < 2:
        return "the model has no repeated blocks"
    if len(step.calls.block) != n_blocks or (np.diff(step.calls.block) < 0).any() or step.model_calls > 1:
        return "its blocks do not run once each, one after the other"
    place = _places(step)
    # Before SHARED is assigned: an op of the prologue is shared only if no weight has gone into its inputs.
    of_weights = _of_weights(step, place)
    place[(place == PREFIX) & (step.ops.phase == Phase.FORWARD) & ~_touches(step, of_weights)] = SHARED
    made_at = np.where(step.storages.producer >= 0, place[step.storages.producer], -1)
    # Values that depend on no weight cross no cut: every stage computes them (rule 3).
    made_at[~of_weights] = -1
    passed = _bytes_between_blocks(step, of_weights, made_at)
    if isinstance(passed, str):
        return passed
    cuts, boundary, obstacle = [], {}, ""
    odd = _odd_output(step)
    for cut in range(1, n_blocks):
        found = odd[1] if odd is not None and odd[0] < cut else _storage_across_cut(step, place, made_at, cut)
        # All messages have one size, since stages receive into buffers made before.
        if isinstance(found, int) and step.storages.bytes[found] == passed:
            cuts.append(cut)
            boundary[cut] = found
        elif not obstacle:
            size = f"{step.blocks[cut]} is given another size than {step.blocks[0]}"
            obstacle = found if isinstance(found, str) else size
    first, last = _outside(step, place)
    outputs = step.block_outputs if any(step.block_outputs) else ()
    return Chain(place, tuple(cuts), passed, boundary, first, last, outputs, obstacle)


def _odd_output(step: Step) -> tuple[int, str] | None:
    """Return the first block whose output another stage cannot recreate (rule 4), and the reason."""
    for block, form in enumerate(step.block_outputs):
        if wrong := not_one_tensor(form):
            return block, f"{step.blocks[block]} returns {wrong}; stages pass on one tensor"
    return None


def _places(step: Step) -> I32:
    """Return the place of each op (see above), -1 outside of forward and backward."""
    n_blocks = len(step.blocks)
    place = np.full(step.ops.n, -1, np.int32)
    forward = step.ops.phase == Phase.FORWARD
    block = step.ops.block
    inside = forward & (block >= 0)
    place[inside] = 2 * block[inside] + 2
    outside = np.flatnonzero(forward & (block < 0))
    # Odd places: between two blocks, before the first or after the last one.
    place[outside] = 1 + 2 * np.searchsorted(step.forward_starts[:n_blocks], outside, side="right")
    backward = np.flatnonzero((step.ops.phase == Phase.RECOMPUTE) | (step.ops.phase == Phase.BACKWARD))
    known = np.where(block[backward] >= 0, 2 * block[backward] + 2, -1)
    # Backward ops of no module (sums of gradients) belong to the block whose backward ran last.
    known[known < 0] = _prologue(known)[known < 0]
    # Before any block's backward: that of the loss and the head.
    known[known < 0] = 2 * n_blocks + 1
    in_first = np.flatnonzero(block[backward] == 0)
    if len(in_first):
        # After the first block's backward: that of embeddings.
        known[in_first[-1] + 1 :][block[backward][in_first[-1] + 1 :] < 0] = PREFIX
    place[backward] = known
    return place


def _prologue(values: I32) -> I32:
    """Return each value, or the last one before it that is not negative."""
    at = np.maximum.accumulate(np.where(values >= 0, np.arange(len(values)), -1))
    return np.where(at >= 0, values[at], -1)


def _of_weights(step: Step, place: I32) -> Mask:
    """Return (m,) forward storages that depend on a weight."""
    found = step.parameter_of >= 0
    ends = np.searchsorted(step.uses.op, np.arange(step.ops.n + 1))
    made = [np.flatnonzero(step.storages.producer == op) for op in np.flatnonzero(place == PREFIX)]
    for op, outputs in zip(np.flatnonzero(place == PREFIX).tolist(), made, strict=True):
        if step.ops.phase[op] != Phase.FORWARD:
            continue
        uses = slice(ends[op], ends[op + 1])
        if found[step.uses.storage[uses]].any():
            found[outputs] = True
            found[step.uses.storage[uses][step.uses.mode[uses] != READS]] = True
    later = (step.storages.producer >= 0) & (step.ops.phase[step.storages.producer] == Phase.FORWARD)
    found |= later & (place[step.storages.producer] > PREFIX)
    return found


def _touches(step: Step, storages: Mask) -> Mask:
    """Return (n,) ops that use one of `storages`."""
    found = np.zeros(step.ops.n, bool)
    found[step.uses.op[storages[step.uses.storage]]] = True
    return found


def _bytes_between_blocks(step: Step, of_weights: Mask, made_at: I32) -> int | str:
    """Return the bytes of the first block's input, or the reason why it is not one tensor."""
    given = np.unique(step.calls.inputs.storage[step.calls.inputs.call == 0])
    passed = given[of_weights[given] & (made_at[given] == PREFIX)]
    passed = passed if len(passed) else given
    if len(passed) != 1:
        return (
            f"{step.blocks[0]} is given {len(passed)} tensors that weights have gone into; stages pass on one"
        )
    return int(step.storages.bytes[passed[0]])


def _storage_across_cut(step: Step, place: I32, made_at: I32, cut: int) -> int | str:
    """Return the one storage that is made before the cut and read after it in forward, or the obstacle."""
    here = 2 * cut + 1
    forward = step.ops.phase[step.uses.op] == Phase.FORWARD
    read_at, from_ = place[step.uses.op], made_at[step.uses.storage]
    # At the odd place of the cut: neither stage would run this op (rule 2).
    between = np.flatnonzero(forward & (read_at == here) & (from_ > 0))
    if len(between):
        op = step.uses.op[between[0]]
        return f"{step.names[step.ops.name[op]]} runs between {step.blocks[cut - 1]} and {step.blocks[cut]}"
    crossing = np.flatnonzero(forward & (read_at > here) & (from_ > 0) & (from_ < here))
    storages = np.unique(step.uses.storage[crossing])
    # The output of the block before the cut, which is the one message.
    if len(storages) == 1 and made_at[storages[0]] == here - 1:
        return int(storages[0])
    odd = crossing[made_at[step.uses.storage[crossing]] < here - 1]
    if not len(odd):
        return f"{step.blocks[cut]} is given {len(storages)} tensors"
    op = step.uses.op[odd[0]]
    where = step.modules[step.ops.module[op]] or "the model"
    return f"{step.names[step.ops.name[op]]} in {where} reads what was computed before {step.blocks[cut - 1]}"


def _outside(step: Step, place: I32) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return names of the parameters of no block: used before the blocks, and after them."""
    index = step.parameter_of[step.uses.storage]
    names, block = columns_of(step.parameters).names, columns_of(step.parameters).block
    uses = (index >= 0) & (step.ops.phase[step.uses.op] == Phase.FORWARD)
    at, of = place[step.uses.op[uses]], index[uses]
    after = 2 * len(step.blocks) + 1
    first, last = (
        tuple(names[i] for i in np.unique(of[mask & (block[of] < 0)]).tolist())
        for mask in (at < after, at >= after)
    )
    return first, last


def uploads(step: Step) -> I32:
    """Return storages that hold a micro-batch on the device."""
    if _UPLOAD not in step.names:
        return np.empty(0, np.int32)
    made = (step.storages.producer >= 0) & (step.storages.tier == Tier.DEVICE)
    by = step.storages.producer[made]  # uploads in backward are reloads of saved activations
    made[made] = (step.ops.name[by] == step.names.index(_UPLOAD)) & (step.ops.phase[by] == Phase.FORWARD)
    return np.flatnonzero(made).astype(np.int32)


def batch_on_host(step: Step, ops: I32) -> I32:
    """Return storages in host memory, live before the step, from which uploads among `ops` copy."""
    loads = ops[step.ops.resource[ops] == Resource.HOST_TO_DEVICE]
    batch = np.unique(step.uses.storage[np.isin(step.uses.op, loads)])
    found: I32 = batch[(step.storages.producer[batch] < 0) & (step.storages.tier[batch] == Tier.HOST)]
    return found
