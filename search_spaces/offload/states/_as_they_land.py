"""What techniques share whose gradients go down as they land (`runtime.gradients_down`): what fits, and how it is applied."""

from __future__ import annotations

from memtune.early_updates import Trigger
from memtune.passes.gradients_down import no_witness
from memtune.passes.host_optimizer import Native
from memtune.program import Program
from memtune.runtime.context import Context
from memtune.runtime.gradients_down import GradientsDown, staying_in
from memtune.runtime.host_optimizer import HostOptimizer, Update
from memtune.runtime.host_update import BLOCK, DTYPES, Moments
from memtune.technique import Reason, Target

_OTHER = "offload: {states: {kind: optimizer_cpu}} with trigger: end_of_step"
_REDUCED = ("ddp", "fsdp", "zero3", "zero1", "zero2")
"""What reduces a gradient to its final value, and has no other one, as soon as it lands or its bucket or unit is complete."""
_REDUCING = "ddp, fsdp, zero3, zero1 or zero2"


def replicas_of(program: Program, target: Target) -> int:
    """Ranks that have all weights of `program`, and average each gradient as it lands."""
    states = target.chosen.get("sharding.states")
    return program.ranks if states is not None and states.kind == "ddp" else 1


def native_of(moments: Moments) -> Native:
    """The native update that stores moments so."""
    return Native(DTYPES[moments].itemsize, BLOCK if moments == "int8" else 0)


def not_as_they_land(program: Program, target: Target, ratio: float = 1.0) -> Reason | None:
    """Why gradients of `program`, or the last `ratio` of them, cannot go down as they land."""
    if target.ranks > 1 and (reason := _not_reduced(target)) is not None:
        return reason
    if target.compiled:
        return Reason("a compiled graph hands its gradients over at its end, not as they are made", "execution.compile: false")
    if no_witness(program.step, ratio):
        return Reason("the smallest parameter gets no gradient, so clipping by norm could not be noticed", _OTHER)
    return None


def _not_reduced(target: Target) -> Reason | None:
    """Why a gradient has not its final value when its part of backward has ended: ranks still change it."""
    parallel, states = target.chosen.get("sharding.parallel"), target.chosen.get("sharding.states")
    if parallel is not None and parallel.kind != "none":
        return Reason(f"gradients that go down as they land are not for {parallel.kind}", _OTHER)
    if states is None or states.kind not in _REDUCED:
        kind = "none" if states is None else states.kind
        return Reason(f"under {kind} gradients are on the device until backward has ended", f"sharding.states: {_REDUCING}")
    if ("find_unused_parameters", True) in states.knobs():
        why = "ranks average gradients one by one as they land, so every rank must have each of them"
        return Reason(why, "find_unused_parameters: false")
    return None


def apply_as_they_land(
    context: Context,
    update: Update,
    moments: Moments,
    bucket_bytes: int,
    trigger: Trigger,
    late_after: int | None = None,
    ratio: float = 1.0,
) -> None:
    """Move the optimizer to the host, or `ratio` of it, then have gradients follow as they land."""
    stays = staying_in(context, ratio) if ratio < 1.0 else []
    optimizer = HostOptimizer(context, update, moments, late_after, stays)
    context.checks["offload.states"] = GradientsDown(context, optimizer, bucket_bytes, trigger, set(stays)).check
