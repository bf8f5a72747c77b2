"""Pass and planning figures of techniques that load block by block; their rules are in `layer_rules`."""

from __future__ import annotations

import numpy as np

from memtune.hardware import Hardware, op_costs
from memtune.offload.optimizer import Native, optimizer_on_host
from memtune.offload.parameters import Overlap, moment_of_ops, replicas, stream_parameters
from memtune.program import F64, Program, Residency, Resource, Step, memoized


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
