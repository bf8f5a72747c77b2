"""Whether the blocks of a recorded step are a chain, as `offload.layer_major.block_chain` sees it in a live
model (Rules 1 to 3 there).
"""

from __future__ import annotations

import functools

import numpy as np

from memtune.offload.layer_major.layer_major_pass import parts_of
from memtune.offload.layer_major.tied_weights_pass import shared_weights, two_parts
from memtune.offload.parameters import not_in_layers
from memtune.program import WRITES, Kind, Phase, Step, columns_of

_ATTENTION = "scaled_dot_product"
"""In the names of ops that may draw, and do not without dropout; a live model is looked at before it trains.
"""


@functools.lru_cache(maxsize=8)
def not_a_chain(step: Step) -> str:
    """Why the blocks of `step` cannot each run over all micro-batches before the next one; empty where they
    can.
    """
    if why := not_in_layers(step):
        return why
    return _own_checkpoint(step) or _changes(step) or _between(step) or _beside(step) or _twice(step)


def _module(step: Step, op: int) -> str:
    return step.modules[step.ops.module[op]] or "the model"


def _own_checkpoint(step: Step) -> str:
    again = np.flatnonzero((step.ops.phase == Phase.RECOMPUTE) & (step.ops.copy_of < 0))
    return (
        f"{_module(step, int(again[0]))} is run again by a checkpoint of the model's own"
        if len(again)
        else ""
    )


def _changes(step: Step) -> str:
    """Rule 3."""
    names = np.asarray([_ATTENTION not in name for name in step.names], bool)
    draws = np.flatnonzero((step.ops.rng > 0) & (step.ops.phase < Phase.BOUNDARY) & names[step.ops.name])
    if len(draws):
        return f"{_module(step, int(draws[0]))} draws random numbers, and their order would be another"
    writes = (
        (step.uses.mode == WRITES)
        & (step.storages.producer[step.uses.storage] < 0)
        & (step.use_phase < Phase.BOUNDARY)
    )
    writes &= step.storages.kind[step.uses.storage] == Kind.BUFFER
    if writes.any():
        return (
            f"forward of {_module(step, int(step.uses.op[writes.argmax()]))} changes a buffer, and blocks run"
            " forward twice"
        )
    return ""


def _between(step: Step) -> str:
    """Rule 1: nothing runs between blocks, and only the next one uses what a block makes."""
    parts, n_blocks = parts_of(step), len(step.blocks)
    inside = np.concatenate(parts.forward)
    strays = inside[step.ops.block[inside] < 0]
    if len(strays):
        return (
            f"{step.names[step.ops.name[strays[0]]]} of {_module(step, int(strays[0]))} runs between the"
            " blocks"
        )
    forward = step.use_phase == Phase.FORWARD
    producer = step.storages.producer[step.uses.storage]
    made_in = np.where(producer >= 0, parts.region[producer], n_blocks)
    made_in = np.where((producer >= 0) & (step.ops.phase[producer] == Phase.FORWARD), made_in, n_blocks)
    used_in = parts.region[step.uses.op]
    wrong = forward & (made_in >= 0) & (made_in < n_blocks) & (used_in != made_in) & (used_in != made_in + 1)
    given = np.zeros((n_blocks, step.storages.n), bool)
    given[step.calls.inputs.call, step.calls.inputs.storage] = True
    into = forward & (used_in >= 0) & (used_in < n_blocks) & (made_in < used_in) & (producer >= 0)
    wrong |= into & ~given[np.clip(used_in, 0, n_blocks - 1), step.uses.storage]
    if wrong.any():
        op = int(step.uses.op[wrong.argmax()])
        return f"{_module(step, op)} uses what was made before it and not given to its block"
    return ""


def _beside(step: Step) -> str:
    """Rule 2, as far as a step shows it: something is given to the first block alone."""
    given = [set(step.calls.inputs.storage[step.calls.inputs.call == i].tolist()) for i in (0, 1)]
    parts = parts_of(step)
    if len(parts.back_before) and not given[0] - given[1]:
        return f"{step.blocks[1]} is given all that {step.blocks[0]} is"
    return ""


def _twice(step: Step) -> str:
    """A weight before the blocks and after them has a gradient of two parts; nothing else there has one in
    common.
    """
    parts, inside = parts_of(step), np.zeros(step.ops.n, bool)
    inside[parts.back_before] = True
    for parameter in shared_weights(step, parts.before, parts.after):
        found = two_parts(step, parameter)
        if (
            found is None
            or step.storages.producer[found.after] not in parts.back_after
            or not inside[step.storages.producer[found.before]]
        ):
            return (
                f"the gradient of {columns_of(step.parameters).names[parameter]} is not one sum of what comes"
                " before and after"
            )
        inside[found.adder] = False
    producer = step.storages.producer[step.uses.storage]
    skips = inside[step.uses.op] & (producer >= 0) & np.isin(producer, parts.back_after)
    if skips.any():
        return "what comes after the blocks uses what was made before them"
    return ""
