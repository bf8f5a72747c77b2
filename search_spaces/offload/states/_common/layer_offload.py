"""Rules, pass, apply of techniques that offload the blocks' parameters (`offload.parameters.offloader`)."""

from __future__ import annotations

import numpy as np

from memtune import refusals
from memtune.hardware import Hardware, op_costs
from memtune.offload.optimizer import Native, optimizer_on_host, unknown_optimizer
from memtune.offload.parameters import Overlap, moment_of_ops, not_in_layers, stream_parameters
from memtune.program import (
    F64,
    Kind,
    Program,
    Residency,
    Resource,
    Step,
    columns_of,
    gathers_of,
    memoized,
    window_residency,
)
from memtune.search_spaces._support import Config, conflict
from memtune.technique import Reason, Target, Technique

EAGER_ONLY = "compiled graphs keep offloaded parameters in device memory"
_OTHER = "offload: {states: {kind: optimizer_cpu}}"
_BY_DEFAULT = (
    ("reshard_after_forward", True),
    ("blocks_per_unit", 1),
    ("prefetch", None),
    ("param_dtype", None),
    ("reduce_dtype", None),
)


def cannot_run(
    program: Program, target: Target, *, natively: bool = True, alone: bool = True
) -> Reason | None:
    """Return why blocks' parameters cannot be offloaded in `program`, on one rank.

    `natively`: the native update runs, not the user's own optimizer.
    """
    step = program.step
    if alone and (program.ranks > 1 or target.ranks > 1):
        return Reason("offload of blocks' parameters is for one rank", "sharding: {states: {kind: fsdp}}")
    return _cannot_offload_parameters(step, target, natively)


def cannot_run_on_ranks(
    technique: Technique, program: Program, target: Target, *, natively: bool = True
) -> Reason | None:
    """Return the same for `technique` on one rank, on replicas, or on ranks that all-gather each block."""
    if target.ranks > 1:
        if (reason := conflict(technique, target, "sharding.parallel", "sharding.states")) is not None:
            return reason
        states = target.chosen["sharding.states"]
        if states.effects.shards == "parameters":
            if (reason := _not_gathered(technique, program, target)) is not None:
                return reason
    return _cannot_offload_parameters(program.step, target, natively)


def other_gathers(config: Config) -> Reason | None:
    """Return why parameters of blocks cannot be offloaded with these settings of FSDP2; for `refuses`."""
    states = config.chosen.get("sharding.states") if config.ranks > 1 else None
    if states is None or states.effects.shards != "parameters":
        return None
    for name, value in _BY_DEFAULT:
        if getattr(states, name, value) is not value:
            return Reason(
                f"sharded blocks are offloaded with FSDP2's default gathers, not with {name}", f"no {name}"
            )
    if getattr(states, "degree", None) not in (None, config.ranks):
        return Reason("sharded blocks are offloaded only if all ranks share a copy", "no degree")
    return None


def _not_gathered(technique: Technique, program: Program, target: Target) -> Reason | None:
    """Return why FSDP2 does not all-gather each block once per pass, among all ranks."""
    if (reason := other_gathers(target)) is not None:
        return reason
    if (reason := conflict(technique, target, "sharding.communication")) is not None:
        return reason
    if gathers_of(program.step) is None:
        return Reason("a block is not gathered once for each pass", "sharding: {states: {kind: ddp}}")
    return None


def _cannot_offload_parameters(step: Step, target: Target, natively: bool) -> Reason | None:
    if target.compiled:
        return Reason(EAGER_ONLY, "execution.compile: false")
    if (reason := not_in_layers(step)) != "":
        return Reason(reason, _OTHER)
    columns = columns_of(step.parameters)
    trained = columns.gradient >= 0
    in_blocks = columns.block[trained] >= 0
    if not in_blocks.any() or not (step.storages.kind == Kind.OPTIMIZER).any():
        return Reason("the optimizer has no state of a block to offload")
    if natively and (unknown := unknown_optimizer(target)) is not None:
        return unknown
    if natively and (columns.itemsize[trained] != 4).any():
        return refusals.float32_weights("offload: {states: {kind: optimizer_cpu, update: master}}")
    return None


def compute_s_of_moments(step: Step, hardware: Hardware) -> F64:
    """Return (2 · blocks,) seconds of compute in each moment."""
    moment = moment_of_ops(step)
    mine = (moment >= 0) & (step.ops.resource == Resource.COMPUTE)
    found: F64 = np.bincount(moment[mine], op_costs(step, hardware).op_s[mine], 2 * len(step.blocks)).astype(
        np.float64
    )
    return found


@memoized
def in_layers(program: Program, residency: Residency, overlap: Overlap | None = None) -> Program:
    """Return the program with blocks' parameters loaded as in `residency`, and every update on the host."""
    step = stream_parameters(program.step, residency, ranks=replicas(program), overlap=overlap)
    return program.with_step(optimizer_on_host(step, Native()))


def replicas(program: Program) -> int:
    """Return the number of ranks that have all weights."""
    return 1 if gathers_of(program.step) is not None else program.ranks


def window_of(program: Program, slots: int) -> Residency:
    """Return the residency of `slots` blocks of `program`, or of a rank's rows, on the device at once."""
    return window_residency(len(program.step.blocks), slots, gathered=gathers_of(program.step) is not None)
