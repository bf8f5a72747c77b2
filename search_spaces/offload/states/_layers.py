"""What techniques share that keep the blocks' parameters on the host (`runtime.store`): what fits, and how it is applied."""

from __future__ import annotations

import numpy as np

from memtune.errors import ApplyError
from memtune.hardware import Hardware
from memtune.op_costs import op_costs
from memtune.parameters import columns_of
from memtune.passes.host_optimizer import Native, optimizer_on_host
from memtune.passes.stream import moment_of_ops, not_in_layers, stream_parameters
from memtune.program import F64, Kind, Program, Resource, Step
from memtune.residency import Residency
from memtune.runtime.context import Context
from memtune.runtime.host_optimizer import HostOptimizer
from memtune.runtime.store import ParameterStore
from memtune.technique import Reason, Target

EAGER_ONLY = "compiled graphs hold the memory of parameters that come and go"
_OTHER = "offload: {states: {kind: optimizer_cpu}}"
_SCHEDULED = ("a frozen schedule", "a schedule")


def cannot_run(program: Program, target: Target, *, natively: bool = True, alone: bool = True) -> Reason | None:
    """Why blocks' parameters cannot come and go in `program`, updated `natively` or by the user's own optimizer, on one rank."""
    step = program.step
    if alone and (program.ranks > 1 or target.ranks > 1):
        return Reason("parameters that come and go are for one rank", "sharding: {states: {kind: fsdp}}")
    return _cannot_come_and_go(step, target, natively)


def cannot_run_on_ranks(program: Program, target: Target, *, natively: bool = True) -> Reason | None:
    """As `cannot_run`, on one rank or on replicas."""
    if target.ranks > 1:
        states, parallel = (target.chosen.get(f"sharding.{slot}") for slot in ("states", "parallel"))
        if parallel is not None and parallel.kind != "none":
            return Reason("blocks that come and go are whole on each rank", "sharding: {parallel: {kind: none}}")
        if states is None or states.kind != "ddp":
            return Reason("blocks that come and go are for replicas on several ranks", "sharding: {states: {kind: ddp}}")
    return _cannot_come_and_go(program.step, target, natively)


def _cannot_come_and_go(step: Step, target: Target, natively: bool) -> Reason | None:
    if target.compiled:
        return Reason(EAGER_ONLY, "execution.compile: false")
    if takes_a_schedule(target):
        return Reason("a schedule takes the place of the blocks' calls", "recompute: {kind: full}")
    if (reason := not_in_layers(step)) != "":
        return Reason(reason, _OTHER)
    columns = columns_of(step.parameters)
    trained = columns.gradient >= 0
    in_blocks = columns.block[trained] >= 0
    if not in_blocks.any() or not (step.kind == Kind.OPTIMIZER).any():
        return Reason("the optimizer has no state of a block to move")
    if in_blocks.all():
        return Reason("nothing outside of the blocks is trained, so clipping by norm could not be noticed", _OTHER)
    if natively and (columns.itemsize[trained] != 4).any():
        return Reason("the native update keeps float32 weights", "offload: {states: {kind: optimizer_cpu, update: master}}")
    return None


def takes_a_schedule(target: Target) -> bool:
    """Whether another axis runs the model's ops by a schedule of its own."""
    return any(each.eager_only.startswith(_SCHEDULED) or ("by_schedule", True) in each.knobs() for each in target.chosen.values())


def compute_s_of_moments(step: Step, hardware: Hardware) -> F64:
    """(2 · blocks,) seconds of compute in each moment."""
    moment = moment_of_ops(step)
    mine = (moment >= 0) & (step.op_resource == Resource.COMPUTE)
    found: F64 = np.bincount(moment[mine], op_costs(step, hardware).op_s[mine], 2 * len(step.blocks)).astype(np.float64)
    return found


def in_layers(program: Program, residency: Residency) -> Program:
    """The program with its blocks' parameters as `residency` says, and every update on the host."""
    return program.with_step(optimizer_on_host(stream_parameters(program.step, residency, ranks=program.ranks), Native()))


def apply_layers(context: Context, kind: str, residency: Residency) -> None:
    """Move the optimizer to the host, then the blocks' parameters.

    Raises:
        ApplyError: Ranks share a copy of the model.
    """
    require_replicas(context, kind)
    store = ParameterStore(context, residency, HostOptimizer(context, "native"))
    context.checks["offload.states"] = store.check


def require_replicas(context: Context, kind: str) -> None:
    """Refuse what `cannot_run_on_ranks` refuses: a config may say it all the same."""
    if context.ranks > 1 and (context.runner is None or context.parts > 1):
        raise ApplyError(
            f"{kind} is for replicas on several ranks.",
            fix="sharding: {states: {kind: ddp}, parallel: {kind: none}}", code="MT364",
        )  # fmt: skip
