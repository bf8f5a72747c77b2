"""Optimizer on the host: master weights, moments and the update in host memory (ZeRO-Offload, Ren et al. 2021)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.passes.host_optimizer import optimizer_on_host
from memtune.program import Kind, Program
from memtune.runtime.context import Context
from memtune.runtime.host_optimizer import HostOptimizer
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class OptimizerCpu(Technique):
    """Trades one copy of the gradients down and of the weights up per step for all optimizer state on the device.

    The user's own optimizer runs on the host, after the last gradient has arrived. Bitwise on one kind of device; from
    GPU to host the same formula is evaluated by other kernels.

    Distinguishing test: no byte of optimizer state is on the device; gradients cross the link once down, weights once up.
    """

    kind: Literal["optimizer_cpu"] = "optimizer_cpu"
    slot: ClassVar[str] = "offload.states"
    title: ClassVar[str] = "Optimizer state and update on the host"
    source: ClassVar[str] = "Ren et al. 2021, ZeRO-Offload: Democratizing Billion-Scale Model Training, arXiv:2101.06840"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs an optimizer whose state is worth moving and, where it is known, host memory for it."""
        step = program.step
        state_bytes = int(step.bytes[step.kind == Kind.OPTIMIZER].sum())
        if state_bytes == 0 and not any(p.gradient >= 0 for p in step.parameters):
            return Reason("the optimizer has nothing to update")
        return None

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """State to the host tier, update to host threads, copies around it."""
        return program.with_step(optimizer_on_host(program.step))

    def apply(self, context: Context, plan: Plan) -> None:
        """Rebind the optimizer to host copies of its parameters."""
        context.checks["offload.states"] = HostOptimizer(context).check

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of the state, and when the update runs."""
        return {"states.offload": {"optimizer": "host", "trigger": "end_of_step"}}
