"""Rules and apply of techniques that offload each gradient when it is ready
(`offload.optimizer.grad_offload`).
"""

from __future__ import annotations

from memtune import refusals
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
    """Return the number of ranks with all weights that average each gradient when it is ready."""
    states = target.chosen.get("sharding.states")
    return program.ranks if states is not None and states.effects.shards == "replicas" else 1


def native_of(moments: Moments) -> Native:
    """Return the native update that stores moments in this type."""
    return Native(DTYPES[moments].itemsize, BLOCK if moments == "int8" else 0)


def cannot_offload_on_grad_ready(
    technique: Technique, program: Program, target: Target, ratio: float = 1.0
) -> Reason | None:
    """Return why the last `ratio` of the gradients cannot be offloaded when they are ready."""
    if target.ranks > 1 and (reason := _not_reduced(technique, target)) is not None:
        return reason
    if target.compiled:
        return Reason(
            "a compiled graph returns its gradients at its end, not when each is ready",
            "execution.compile: false",
        )
    if no_sentinel(program.step, ratio):
        return refusals.clipping_unnoticed_in_step(_OTHER)
    return None


def _not_reduced(technique: Technique, target: Target) -> Reason | None:
    """Return why a gradient is not final when its part of backward ends: a later reduction changes it."""
    return conflict(technique, target, "sharding.parallel", "sharding.states")


def apply_on_grad_ready(
    context: Context,
    update: Update,
    moments: Moments,
    bucket_bytes: int,
    trigger: Trigger,
    delay_after: int | None = None,
    ratio: float = 1.0,
) -> None:
    """Move the optimizer, or `ratio` of it, to the host, and offload gradients when they are ready."""
    resident = resident_parameters(context, ratio) if ratio < 1.0 else []
    optimizer = HostOptimizer(context, update, moments, delay_after, resident)
    context.checks["offload.states"] = GradientOffload(
        context, optimizer.check, bucket_bytes, trigger, optimizer, set(resident)
    ).check
