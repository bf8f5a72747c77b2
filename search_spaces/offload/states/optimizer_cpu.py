"""Optimizer on the host: master weights, moments and the update in host memory (ZeRO-Offload, Ren et al.
2021).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from memtune.effects import GRADIENTS_AT_END, Effects
from memtune.offload.core import Trigger
from memtune.offload.optimizer import (
    HostOptimizer,
    Moments,
    OffloadTiming,
    optimizer_on_host,
    overlap_optimizer,
)
from memtune.program import Kind, Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common import (
    apply_as_they_land,
    native_of,
    no_native_update,
    not_as_they_land,
    replicas_of,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class OptimizerCpu(Technique):
    """Trades one copy of the gradients down and of the weights up per step for all optimizer state on the
    device.

    The update runs on the host, after the last gradient has arrived: the user's own optimizer, or one native
    pass over each parameter. Bitwise on one kind of device; from GPU to host the same formula is evaluated by
    other kernels. With float32 masters for bfloat16 parameters, or with narrow moments, results are others
    than the user's own optimizer would give.

    Distinguishing test: no byte of optimizer state is on the device; gradients cross the link once down,
    weights once up.
    """

    kind: Literal["optimizer_cpu"] = "optimizer_cpu"
    slot: ClassVar[str] = "offload.states"
    title: ClassVar[str] = "Optimizer state and update on the host"
    source: ClassVar[str] = (
        "Ren et al. 2021, ZeRO-Offload: Democratizing Billion-Scale Model Training, arXiv:2101.06840"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    update: Literal["own", "native", "master"] = "own"
    """`native` moves fewer bytes than torch's own loop and has the bits of torch's fused AdamW, for float32
    parameters. `master` keeps float32 masters for bfloat16 parameters: the gradient goes down and the weight
    comes up in bfloat16, the update is in float32.
    """
    moments: Moments = "float32"
    """Of a native update: narrow moments (`bfloat16`, `int8` in blocks of 256, both rounded stochastically)
    save host bytes and cost precision; on few cores they also cost time, which is predicted from the bytes
    alone.
    """

    trigger: Trigger = "end_of_step"
    """When a native update runs: after the last gradient has come down; or beside backward, each parameter as
    its gradient lands (`per_gradient`) or each block when all of its gradients have (`per_layer`). The
    weights are the same to the bit, and go up in the step. In `end_of_step` gradients wait on the device, so
    clipping by norm works, and so does leaving a step out; else clipping is refused, and what has been
    updated stays so.
    """

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.update == "own" and self.trigger != "end_of_step":
            raise ValueError(
                "the optimizer's own update is one step over all parameters: set update, or trigger:"
                " end_of_step"
            )
        if self.update == "own" and self.moments != "float32":
            raise ValueError(
                "the optimizer's own update keeps its moments as they are: set update, or moments: float32"
            )
        return self

    @property
    def effects(self) -> Effects:
        """Gradients leave when they are ready, but with the trigger `end_of_step`."""
        if self.trigger == "end_of_step":
            return Effects(host_share=1.0)
        return Effects(calls="grad_hooks", eager_only=GRADIENTS_AT_END, host_share=1.0)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs an optimizer whose state is worth moving; updates beside backward need one rank and plain
        autograd.
        """
        step = program.step
        state_bytes = int(step.storages.bytes[step.storages.kind == Kind.OPTIMIZER].sum())
        if state_bytes == 0 and not any(p.gradient >= 0 for p in step.parameters):
            return Reason("the optimizer has nothing to update")
        if self.update == "own":
            return None
        if self.trigger != "end_of_step" and (reason := not_as_they_land(self, program, target)) is not None:
            return reason
        return no_native_update(step, self.update, target)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """State to the host tier, update to host threads, copies around it."""
        if self.update == "own":
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
            apply_as_they_land(context, self.update, self.moments, 0, self.trigger)

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of the state, and when the update runs."""
        how = {} if self.update == "own" else {"update": self.update, "moments": self.moments}
        return {"states.offload": {"optimizer": "host", "trigger": self.trigger, **how}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Narrow moments are never proposed."""
        return {"update": ("own", "native", "master")}

    def exactly(self) -> Exactness:
        """Lossy with masters or narrow moments; a native update rounds roots as torch's fused kernel does,
        not its loops.
        """
        if self.update == "own":
            return self.exactness
        return (
            Exactness.LOSSY if self.update == "master" or self.moments != "float32" else Exactness.REORDERED
        )
