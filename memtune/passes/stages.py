"""Where a step's blocks may be divided into the stages of a pipeline, and which of its ops are whose.

Every op of forward and backward has a *place*: before the blocks (1), in block i (2i + 2), between block i and the next (2i + 3),
after the last of n blocks (2n + 1). A cut before block c is at 2c + 1, and is right exactly if one tensor of the size of the
first block's input crosses it:

1. Each block runs once per micro-batch, in order.
2. What is computed after the cut reads nothing that was computed before it but the tensor that block c - 1 has made last; code
   between blocks that touches such values stands in no cut, since the stage before ends with its block and the one after begins
   with its own.
3. What no weight goes into (masks, positions) is computed by every stage from its own copy of the batch, and crosses no cut.
4. No block before it returns another tensor: a later stage, where it does not run, makes anew what it returns around the one
   that was sent (`block_outputs`).
5. Backward crosses the cut with one gradient; a weight used on both sides gets its gradient in two parts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtune.block_outputs import not_one_tensor
from memtune.parameters import columns_of
from memtune.program import I32, Phase, Resource, Step, Tier

SHARED = 0
"""The place of ops before the blocks that every stage runs."""
PREFIX = 1
_UPLOAD = "memtune.to_device.default"


@dataclass(frozen=True, eq=False)
class Chain:
    """A step whose blocks are a chain."""

    place: I32  # (n,) of each op of forward and backward, -1 for all others
    cuts: tuple[int, ...]
    """Blocks before which the chain may be cut."""
    passed_bytes: int
    """What crosses a cut forwards, and backwards."""
    boundary: dict[int, int]
    """Cut → the storage that crosses it."""
    first: tuple[str, ...]
    """Parameters outside of the blocks that run before them."""
    last: tuple[str, ...]
    """The same of those that run after them."""
    outputs: tuple[str, ...]
    """What each block returns (`block_outputs`); empty where all of them return a lone tensor."""
    obstacle: str
    """What is in the way at the first place that cannot be cut, '' for nothing."""


@functools.lru_cache(maxsize=8)
def chain_of(step: Step) -> Chain | str:
    """How the blocks of a plain step hang together, or why they are no chain."""
    n_blocks = len(step.blocks)
    if n_blocks < 2:
        return "the model has no repeated blocks"
    if len(step.call_block) != n_blocks or (np.diff(step.call_block) < 0).any() or step.model_calls > 1:
        return "its blocks do not run once each, one after the other"
    place = _places(step)
    of_weights = _of_weights(step, place)
    place[(place == PREFIX) & (step.op_phase == Phase.FORWARD) & ~_touches(step, of_weights)] = SHARED
    made_at = np.where(step.producer >= 0, place[step.producer], -1)
    made_at[~of_weights] = -1
    passed = _passed(step, of_weights, made_at)
    if isinstance(passed, str):
        return passed
    cuts, boundary, obstacle = [], {}, ""
    odd = _odd_output(step)
    for cut in range(1, n_blocks):
        found = odd[1] if odd is not None and odd[0] < cut else _crosses(step, place, made_at, cut)
        if isinstance(found, int) and step.bytes[found] == passed:
            cuts.append(cut)
            boundary[cut] = found
        elif not obstacle:
            size = f"{step.blocks[cut]} is given another size than {step.blocks[0]}"
            obstacle = found if isinstance(found, str) else size
    first, last = _outside(step, place)
    outputs = step.block_outputs if any(step.block_outputs) else ()
    return Chain(place, tuple(cuts), passed, boundary, first, last, outputs, obstacle)


def _odd_output(step: Step) -> tuple[int, str] | None:
    """The first block that returns what no other stage can make anew (rule 4), and what is in the way."""
    for block, form in enumerate(step.block_outputs):
        if wrong := not_one_tensor(form):
            return block, f"{step.blocks[block]} returns {wrong}; stages pass on one tensor"
    return None


def _places(step: Step) -> I32:
    n_blocks = len(step.blocks)
    place = np.full(step.n_ops, -1, np.int32)
    forward = step.op_phase == Phase.FORWARD
    block = step.op_block
    inside = forward & (block >= 0)
    place[inside] = 2 * block[inside] + 2
    outside = np.flatnonzero(forward & (block < 0))
    place[outside] = 1 + 2 * np.searchsorted(step.enter[:n_blocks], outside, side="right")
    backward = np.flatnonzero((step.op_phase == Phase.RECOMPUTE) | (step.op_phase == Phase.BACKWARD))
    known = np.where(block[backward] >= 0, 2 * block[backward] + 2, -1)
    known[known < 0] = _before_it(known)[known < 0]
    known[known < 0] = 2 * n_blocks + 1
    in_first = np.flatnonzero(block[backward] == 0)
    if len(in_first):
        known[in_first[-1] + 1 :][block[backward][in_first[-1] + 1 :] < 0] = PREFIX
    place[backward] = known
    return place


def _before_it(values: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Each value, or the last one before it that is not negative."""
    at = np.maximum.accumulate(np.where(values >= 0, np.arange(len(values)), -1))
    return np.where(at >= 0, values[at], -1)


def _of_weights(step: Step, place: I32) -> npt.NDArray[np.bool_]:
    """(m,) storages of forward that a weight goes into."""
    found = step.parameter_of >= 0
    ends = np.searchsorted(step.use_op, np.arange(step.n_ops + 1))
    made = [np.flatnonzero(step.producer == op) for op in np.flatnonzero(place == PREFIX)]
    for op, outputs in zip(np.flatnonzero(place == PREFIX).tolist(), made, strict=True):
        if step.op_phase[op] != Phase.FORWARD:
            continue
        uses = slice(ends[op], ends[op + 1])
        if found[step.use_storage[uses]].any():
            found[outputs] = True
            found[step.use_storage[uses][step.use_mutates[uses] > 0]] = True
    later = (step.producer >= 0) & (step.op_phase[step.producer] == Phase.FORWARD)
    found |= later & (place[step.producer] > PREFIX)
    return found


def _touches(step: Step, storages: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """(n,) ops that use one of `storages`."""
    found = np.zeros(step.n_ops, bool)
    found[step.use_op[storages[step.use_storage]]] = True
    return found


def _passed(step: Step, of_weights: npt.NDArray[np.bool_], made_at: I32) -> int | str:
    """Bytes of what the first block is given."""
    given = np.unique(step.input_storage[step.input_call == 0])
    passed = given[of_weights[given] & (made_at[given] == PREFIX)]
    passed = passed if len(passed) else given
    if len(passed) != 1:
        return f"{step.blocks[0]} is given {len(passed)} tensors that weights have gone into; stages pass on one"
    return int(step.bytes[passed[0]])


def _crosses(step: Step, place: I32, made_at: I32, cut: int) -> int | str:
    """The one storage that is made before the cut and read after it in forward, or what is in the way."""
    here = 2 * cut + 1
    forward = step.op_phase[step.use_op] == Phase.FORWARD
    read_at, from_ = place[step.use_op], made_at[step.use_storage]
    between = np.flatnonzero(forward & (read_at == here) & (from_ > 0))
    if len(between):
        op = step.use_op[between[0]]
        return f"{step.names[step.op_name[op]]} runs between {step.blocks[cut - 1]} and {step.blocks[cut]}"
    crossing = np.flatnonzero(forward & (read_at > here) & (from_ > 0) & (from_ < here))
    storages = np.unique(step.use_storage[crossing])
    if len(storages) == 1 and made_at[storages[0]] == here - 1:
        return int(storages[0])
    odd = crossing[made_at[step.use_storage[crossing]] < here - 1]
    if not len(odd):
        return f"{step.blocks[cut]} is given {len(storages)} tensors"
    op = step.use_op[odd[0]]
    where = step.modules[step.op_module[op]] or "the model"
    return f"{step.names[step.op_name[op]]} in {where} reads what was computed before {step.blocks[cut - 1]}"


def _outside(step: Step, place: I32) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the parameters of no block that are used before the blocks, and after them."""
    index = step.parameter_of[step.use_storage]
    names, block = columns_of(step.parameters).names, columns_of(step.parameters).block
    uses = (index >= 0) & (step.op_phase[step.use_op] == Phase.FORWARD)
    at, of = place[step.use_op[uses]], index[uses]
    after = 2 * len(step.blocks) + 1
    first, last = (tuple(names[i] for i in np.unique(of[mask & (block[of] < 0)]).tolist()) for mask in (at < after, at >= after))
    return first, last


def uploads(step: Step) -> I32:
    """Storages that hold a micro-batch on the device."""
    if _UPLOAD not in step.names:
        return np.empty(0, np.int32)
    made = (step.producer >= 0) & (step.tier == Tier.DEVICE)
    by = step.producer[made]  # saved activations come back in backward
    made[made] = (step.op_name[by] == step.names.index(_UPLOAD)) & (step.op_phase[by] == Phase.FORWARD)
    return np.flatnonzero(made).astype(np.int32)


def batch_on_host(step: Step, ops: I32) -> I32:
    """Storages in host memory, there from before the step, that those of `ops` which load something load."""
    loads = ops[step.op_resource[ops] == Resource.HOST_TO_DEVICE]
    batch = np.unique(step.use_storage[np.isin(step.use_op, loads)])
    found: I32 = batch[(step.producer[batch] < 0) & (step.tier[batch] == Tier.HOST)]
    return found
