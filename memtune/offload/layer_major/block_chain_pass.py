"""Check that the blocks of a recorded step are a chain: the rules of `offload.layer_major.block_chain`, which
checks a live model.
"""

from __future__ import annotations

import functools

import numpy as np

from memtune.offload.layer_major.layer_major_pass import parts_of, shared_weights, summed_parts
from memtune.offload.parameters import not_in_layers
from memtune.program import WRITES, Kind, Phase, Step, columns_of

_ATTENTION = "scaled_dot_product"
"""Part of names of ops that draw only with dropout; `LayerMajor` refuses dropout in a live model."""


@functools.lru_cache(maxsize=8)
def not_a_chain(step: Step) -> str:
    """Return the reason why the blocks of `step` cannot run in layer-major order; empty if they can."""
    if why := not_in_layers(step):
        return why
    return (
        _user_checkpoint(step)
        or _side_effects(step)
        or _outside_uses(step)
        or _shared_arguments(step)
        or _tied_gradients(step)
    )


def _module(step: Step, op: int) -> str:
    return step.modules[step.ops.module[op]] or "the model"


def _user_checkpoint(step: Step) -> str:
    # Ops of memtune's own recompute are copies of others; the rest ran in a checkpoint of the user's code.
    again = np.flatnonzero((step.ops.phase == Phase.RECOMPUTE) & (step.ops.copy_of < 0))
    return f"{_module(step, int(again[0]))} is recomputed by the model's own checkpoint" if len(again) else ""


def _side_effects(step: Step) -> str:
    """Return a violation of Rule 3: random numbers, or buffers written in forward."""
    names = np.asarray([_ATTENTION not in name for name in step.names], bool)
    draws = np.flatnonzero((step.ops.rng > 0) & (step.ops.phase < Phase.BOUNDARY) & names[step.ops.name])
    if len(draws):
        return f"{_module(step, int(draws[0]))} draws random numbers, and their order would change"
    if step.python_draws:
        return "the model draws random numbers in Python, and their order would change"
    writes = (
        (step.uses.mode == WRITES)
        & (step.storages.producer[step.uses.storage] < 0)
        & (step.use_phase < Phase.BOUNDARY)
    )
    writes &= step.storages.kind[step.uses.storage] == Kind.BUFFER
    if writes.any():
        return (
            f"forward of {_module(step, int(step.uses.op[writes.argmax()]))} writes a buffer, and blocks run"
            " forward twice"
        )
    return ""


def _outside_uses(step: Step) -> str:
    """Return a violation of Rule 1: ops between blocks, or an output used outside of the next block."""
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
    # Tensors from before all blocks are checked below: masks and rotary angles are allowed, as arguments.
    wrong = forward & (made_in >= 0) & (made_in < n_blocks) & (used_in != made_in) & (used_in != made_in + 1)
    given = np.zeros((n_blocks, step.storages.n), bool)
    given[step.calls.inputs.call, step.calls.inputs.storage] = True
    # A tensor that a block reads from a closure would not be saved for its second forward.
    into = forward & (used_in >= 0) & (used_in < n_blocks) & (made_in < used_in) & (producer >= 0)
    wrong |= into & ~given[np.clip(used_in, 0, n_blocks - 1), step.uses.storage]
    if wrong.any():
        op = int(step.uses.op[wrong.argmax()])
        return f"{_module(step, op)} uses a tensor from before it that is no argument of its block"
    return ""


def _shared_arguments(step: Step) -> str:
    """Return a violation of Rule 2, as far as a Step shows it."""
    # A Step does not record which arguments need gradients. If the prologue has a backward, some argument of
    # the first block needs one, so the first block must have an argument of its own.
    given = [set(step.calls.inputs.storage[step.calls.inputs.call == i].tolist()) for i in (0, 1)]
    parts = parts_of(step)
    if len(parts.backward_before) and not given[0] - given[1]:
        return f"{step.blocks[1]} takes all arguments of {step.blocks[0]}, one of which needs a gradient"
    return ""


def _tied_gradients(step: Step) -> str:
    """Return a violation by tensors shared by the code before and after the blocks."""
    # A tied weight is allowed if its gradient is one sum of two parts; any other shared tensor is not.
    parts, inside = parts_of(step), np.zeros(step.ops.n, bool)
    inside[parts.backward_before] = True
    for parameter in shared_weights(step, parts.before, parts.after):
        found = summed_parts(step, parameter)
        if (
            found is None
            or step.storages.producer[found.after] not in parts.backward_after
            or not inside[step.storages.producer[found.before]]
        ):
            return (
                f"the gradient of {columns_of(step.parameters).names[parameter]} is not one sum of its parts"
                " from before and after the blocks"
            )
        # The adder belongs to neither part: the pass replaces it by sums of its own (`add_part`).
        inside[found.adder] = False
    producer = step.storages.producer[step.uses.storage]
    skips = inside[step.uses.op] & (producer >= 0) & np.isin(producer, parts.backward_after)
    if skips.any():
        return "code after the blocks uses a tensor from before them"
    return ""
