"""What techniques share that keep the blocks' parameters on the host (`runtime.store`): what fits, and how it is applied."""

from __future__ import annotations

import numpy as np

from memtune.errors import ApplyError
from memtune.hardware import Hardware
from memtune.op_costs import op_costs
from memtune.parameters import columns_of
from memtune.passes.beside import Beside
from memtune.passes.gathered_rows import gathers_of
from memtune.passes.host_optimizer import Native, optimizer_on_host
from memtune.passes.stream import moment_of_ops, not_in_layers, stream_parameters
from memtune.program import F64, Kind, Program, Resource, Step
from memtune.remembered import remembered
from memtune.residency import Residency, window
from memtune.runtime.beside_store import BesideStore
from memtune.runtime.context import Context
from memtune.runtime.gathered_rows import is_gathered
from memtune.runtime.host_optimizer import HostOptimizer
from memtune.runtime.store import ParameterStore
from memtune.search_spaces.offload.states._native_update import unknown_optimizer
from memtune.technique import Reason, Target, Technique

EAGER_ONLY = "compiled graphs hold the memory of parameters that come and go"
_OTHER = "offload: {states: {kind: optimizer_cpu}}"
_GATHERING = ("fsdp", "zero3")
_BY_DEFAULT = (("reshard_after_forward", True), ("blocks_per_unit", 1), ("prefetch", None), ("reduce_dtype", None))
_SCHEDULED = ("a frozen schedule", "a schedule")


def cannot_run(program: Program, target: Target, *, natively: bool = True, alone: bool = True) -> Reason | None:
    """Why blocks' parameters cannot come and go in `program`, updated `natively` or by the user's own optimizer, on one rank."""
    step = program.step
    if alone and (program.ranks > 1 or target.ranks > 1):
        return Reason("parameters that come and go are for one rank", "sharding: {states: {kind: fsdp}}")
    return _cannot_come_and_go(step, target, natively)


def cannot_run_on_ranks(program: Program, target: Target, *, natively: bool = True, one_by_one: bool = True) -> Reason | None:
    """As `cannot_run`, on one rank, on replicas, or on ranks that gather each block.

    `one_by_one`: replicas average each gradient as it lands, without asking who has one.
    """
    if target.ranks > 1:
        states, parallel = (target.chosen.get(f"sharding.{slot}") for slot in ("states", "parallel"))
        if parallel is not None and parallel.kind != "none":
            return Reason("blocks that come and go are whole on each rank", "sharding: {parallel: {kind: none}}")
        if states is None or states.kind not in ("ddp", *_GATHERING):
            why = "blocks that come and go on several ranks are whole on each, or gathered from all"
            return Reason(why, "sharding: {states: {kind: ddp}} or fsdp")
        if one_by_one and ("find_unused_parameters", True) in states.knobs():
            why = "ranks average gradients of blocks one by one as they land, so every rank must have each of them"
            return Reason(why, "find_unused_parameters: false")
        if states.kind in _GATHERING and (reason := _not_gathered(states, program, target)) is not None:
            return reason
    return _cannot_come_and_go(program.step, target, natively)


def _not_gathered(states: Technique, program: Program, target: Target) -> Reason | None:
    """Why FSDP2 does not gather each block once for forward and once for backward, by one plain message among all ranks."""
    for name, value in _BY_DEFAULT:
        if getattr(states, name, value) is not value:
            return Reason(f"rows of blocks come and go as FSDP2 gathers them by default, not with {name}", f"no {name}")
    sent = target.chosen.get("sharding.communication")
    if getattr(states, "degree", None) not in (None, target.ranks):
        return Reason("rows of blocks come and go where all ranks share a copy", "no degree")
    if sent is not None and sent.kind not in ("none", "plain"):
        return Reason(f"blocks whose rows come and go are gathered by one message, not as {sent.kind} does", "plain")
    if gathers_of(program.step) is None:
        return Reason("a block is not gathered once for each pass", "sharding: {states: {kind: ddp}}")
    return None


def _cannot_come_and_go(step: Step, target: Target, natively: bool) -> Reason | None:
    if target.compiled:
        return Reason(EAGER_ONLY, "execution.compile: false")
    if (reason := not_in_layers(step)) != "":
        return Reason(reason, _OTHER)
    columns = columns_of(step.parameters)
    trained = columns.gradient >= 0
    in_blocks = columns.block[trained] >= 0
    if not in_blocks.any() or not (step.kind == Kind.OPTIMIZER).any():
        return Reason("the optimizer has no state of a block to move")
    if in_blocks.all():
        return Reason("nothing outside of the blocks is trained, so clipping by norm could not be noticed", _OTHER)
    if natively and (unknown := unknown_optimizer(target)) is not None:
        return unknown
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


@remembered
def in_layers(program: Program, residency: Residency, beside: Beside | None = None) -> Program:
    """The program with its blocks' parameters as `residency` says, and every update on the host.

    Args:
        program: Any.
        residency: Which block is there when.
        beside: As in `stream_parameters`.
    """
    step = stream_parameters(program.step, residency, ranks=replicas(program), beside=beside)
    return program.with_step(optimizer_on_host(step, Native()))


def replicas(program: Program) -> int:
    """Ranks that have all weights."""
    return 1 if gathers_of(program.step) is not None else program.ranks


def window_of(program: Program, slots: int) -> Residency:
    """`slots` blocks of `program`, or a rank's rows of them, on the device at once."""
    return window(len(program.step.blocks), slots, gathered=gathers_of(program.step) is not None)


def apply_layers(context: Context, kind: str, slots: int, beside: Beside | None = None) -> None:
    """Move the optimizer to the host, then the blocks' parameters, `slots` blocks of which are on the device at once.

    Args:
        context: Of the model.
        kind: For messages.
        slots: The window.
        beside: As in `stream_parameters`.

    Raises:
        ApplyError: Ranks share a copy of the model in another way than FSDP2 by default.
    """
    require_replicas(context, kind)
    residency = window(len(context.blocks), slots, gathered=is_gathered(context.model))
    optimizer = HostOptimizer(context, "native")
    if beside is None:
        store = ParameterStore(context, residency, optimizer)
    else:
        store = BesideStore(context, residency, optimizer, beside.late, at_end=beside.at_end)
    context.checks["offload.states"] = store.check


def require_replicas(context: Context, kind: str) -> None:
    """Refuse what `cannot_run_on_ranks` refuses: a config may say it all the same.

    Raises:
        ApplyError: It does.
    """
    if context.ranks > 1 and ((context.runner is None and not is_gathered(context.model)) or context.parts > 1):
        raise ApplyError(
            f"{kind} is for replicas or for fsdp on several ranks.",
            fix="sharding: {states: {kind: fsdp}, parallel: {kind: none}}", code="MT364",
        )  # fmt: skip
