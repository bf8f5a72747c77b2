"""What techniques share whose gradients go down as they land (`offload.optimizer.grad_offload`): what fits,
and how it is applied.
"""

from __future__ import annotations

from memtune.offload.core import Trigger
from memtune.offload.optimizer import (
    BLOCK,
    DTYPES,
    GradientOffload,
    HostOptimizer,
    Moments,
    Native,
    Update,
    no_sentinel,
    resident_parameters,
)
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces._support import conflict
from memtune.technique import Reason, Target, Technique

_OTHER = "offload: {states: {kind: optimizer_cpu}} with trigger: end_of_step"


def replicas_of(program: Program, target: Target) -> int:
    """Ranks that have all weights of `program`, and average each gradient as it lands."""
    states = target.chosen.get("sharding.states")
    return program.ranks if states is not None and states.effects.shards == "replicas" else 1


def native_of(moments: Moments) -> Native:
    """The native update that stores moments so."""
    return Native(DTYPES[moments].itemsize, BLOCK if moments == "int8" else 0)


def not_as_they_land(
    technique: Technique, program: Program, target: Target, ratio: float = 1.0
) -> Reason | None:
    """Why gradients of `program`, or the last `ratio` of them, cannot go down as they land."""
    if target.ranks > 1 and (reason := _not_reduced(technique, target)) is not None:
        return reason
    if target.compiled:
        return Reason(
            "a compiled graph hands its gradients over at its end, not as they are made",
            "execution.compile: false",
        )
    if no_sentinel(program.step, ratio):
        return Reason(
            "the smallest parameter gets no gradient, so clipping by norm could not be noticed", _OTHER
        )
    return None


def _not_reduced(technique: Technique, target: Target) -> Reason | None:
    """Why a gradient has not its final value when its part of backward has ended: ranks still change it."""
    return conflict(technique, target, "sharding.parallel", "sharding.states")


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
    stays = resident_parameters(context, ratio) if ratio < 1.0 else []
    optimizer = HostOptimizer(context, update, moments, late_after, stays)
    context.checks["offload.states"] = GradientOffload(
        context, optimizer, bucket_bytes, trigger, set(stays)
    ).check
