"""Optimizer on the host: master weights, moments and the update in host memory (ZeRO-Offload)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from memtune.effects import GRADIENTS_AT_END, Effects
from memtune.offload.core import Trigger
from memtune.offload.optimizer import (
    UPDATES,
    HostOptimizer,
    Moments,
    OffloadTiming,
    no_native_update,
    optimizer_on_host,
    overlap_optimizer,
)
from memtune.program import Kind, Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.grad_offload_technique import (
    apply_on_grad_ready,
    cannot_offload_on_grad_ready,
    native_of,
    replicas_of,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class OptimizerCpu(Technique):
    """Trades one D2H copy of the gradients and one H2D copy of the weights per step for all optimizer state
    on the device.

    The update runs on the host after the last gradient has arrived: the user's own optimizer, or one native
    pass over each parameter. Bitwise on one kind of device; from GPU to host the same formula is evaluated by
    other kernels. Float32 masters for bfloat16 parameters, or narrow moments, give other results than the
    user's own optimizer.
    """

    kind: Literal["optimizer_cpu"] = "optimizer_cpu"
    title: ClassVar[str] = "Optimizer state and update on the host"
    source: ClassVar[str] = (
        "Ren et al. 2021, ZeRO-Offload: Democratizing Billion-Scale Model Training, arXiv:2101.06840"
    )
    paper: ClassVar[str] = "ZeRO-Offload"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    update: Literal["user", "native", "master"] = "user"
    """`native` moves fewer bytes than torch's own loop and has the bits of torch's fused AdamW, for float32
    parameters. `master` keeps float32 masters for bfloat16 parameters: gradients and weights cross the link
    in bfloat16, the update is in float32.
    """
    moments: Moments = "float32"
    """Type of a native update's moments: narrow ones (`bfloat16`, `int8` in blocks of 256, both rounded
    stochastically) save host bytes and cost precision; on few cores they also cost time, which the prediction
    does not include.
    """

    trigger: Trigger = "end_of_step"
    """Time of a native update: after the last gradient has arrived, or overlapped with backward, for each
    parameter when its gradient is ready (`per_gradient`) or for each block when all of its gradients are
    (`per_layer`). The weights are the same to the bit, and are copied H2D in the step. With `end_of_step`
    gradients are on the device until the step, so clipping by norm and skipping a step work; else clipping is
    refused after updates in backward, which cannot be undone.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        when = {"end_of_step": "", "per_gradient": " per gradient", "per_layer": " block by block"}[
            self.trigger
        ]
        return f"keeps optimizer state in host memory and updates there{when}{UPDATES[self.update]}"

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.update == "user" and self.trigger != "end_of_step":
            raise ValueError(
                "the user's own update is one step over all parameters: set update, or trigger: end_of_step"
            )
        if self.update == "user" and self.moments != "float32":
            raise ValueError(
                "the user's own update keeps its moments as they are: set update, or moments: float32"
            )
        return self

    @property
    def effects(self) -> Effects:
        if self.trigger == "end_of_step":
            return Effects(host_share=1.0)
        return Effects(calls="grad_hooks", eager_only=GRADIENTS_AT_END, host_share=1.0)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require something to update; for updates during backward gradients that are ready one by one."""
        step = program.step
        state_bytes = int(step.storages.bytes[step.storages.kind == Kind.OPTIMIZER].sum())
        if state_bytes == 0 and not any(p.gradient >= 0 for p in step.parameters):
            return Reason("the optimizer has nothing to update")
        if self.update == "user":
            return None
        if (
            self.trigger != "end_of_step"
            and (reason := cannot_offload_on_grad_ready(self, program, target)) is not None
        ):
            return reason
        return no_native_update(step, self.update, target)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Move state and update to the host, and add copies before and after the update."""
        if self.update == "user":
            return program.with_step(optimizer_on_host(program.step))
        native = native_of(self.moments)
        if self.trigger == "end_of_step":
            return program.with_step(optimizer_on_host(program.step, native))
        early = OffloadTiming(0, self.trigger, replicas=replicas_of(program, target))
        return program.with_step(overlap_optimizer(program.step, native, early, program.ranks))

    def apply(self, context: Context, plan: Plan) -> None:
        """Rebind the optimizer to host copies of its parameters."""
        if self.trigger == "end_of_step":
            context.checks["offload.states"] = HostOptimizer(context, self.update, self.moments).check
        else:
            apply_on_grad_ready(context, self.update, self.moments, 0, self.trigger)

    def record(self, target: Target) -> dict[str, Any]:
        knobs = {} if self.update == "user" else {"update": self.update, "moments": self.moments}
        return {"states.offload": {"optimizer": "host", "trigger": self.trigger, **knobs}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # Lossy narrow moments are never proposed.
        return {"update": ("user", "native", "master")}

    def exactly(self) -> Exactness:
        # A native update rounds square roots as torch's fused kernel does, not as its loops do: reordered.
        if self.update == "user":
            return self.exactness
        return (
            Exactness.LOSSY if self.update == "master" or self.moments != "float32" else Exactness.REORDERED
        )
