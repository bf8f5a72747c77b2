"""Optimizer state on SSD, with every parameter updated inside backward (LoHan)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.effects import GRADIENTS_AT_END, Effects
from memtune.offload.optimizer import UPDATES, GradientOffload, no_native_update, no_state_to_offload
from memtune.offload.ssd_states import SsdOverlappedOptimizer, not_overlappable, optimizer_on_ssd_overlapped
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.grad_offload_technique import (
    cannot_offload_on_grad_ready,
    replicas_of,
)
from memtune.search_spaces.offload.states._common.layer_rules import NativelyUpdated
from memtune.ssd import offload_dir
from memtune.technique import Plan, Reason, Target, no_directory
from memtune.units import MIB


class Lohan(NativelyUpdated):
    """Trades a read and a write of all optimizer state per step for its bytes on device and host, overlapped
    with backward.

    Master weights and moments lie on SSD, one piece per parameter. Gradients are offloaded in buckets when
    they are ready; during backward their pieces are read, updated on the host, and written ("active gradient
    offloading"): read, update and write are three stages with a bucket in each. Nothing is stale: weights are
    those of an update at the end of the step, to the bit. The work that `zero_infinity` does after backward
    is finished with backward. With accumulation the host sums gradients and the last micro-batch updates.
    Clipping by norm between backward and step is detected and refused, since gradients are consumed by then.
    The paper's other half, the choice of activation bytes to swap or recompute and of those to write to SSD,
    is `recompute: {kind: lohan}`.
    """

    kind: Literal["lohan"] = "lohan"
    title: ClassVar[str] = "Optimizer state on SSD, updated inside backward"
    source: ClassVar[str] = (
        "Liao et al. 2024, LoHan: Low-Cost High-Performance Framework to Fine-Tune 100B Model on a Consumer"
        " GPU, arXiv:2403.06504, active gradient offloading"
    )
    paper: ClassVar[str] = "LoHan"

    bucket_mib: Annotated[float, Field(ge=0, le=65536)] = 32.0
    """Gradients that are offloaded together, and whose state is read meanwhile. A larger bucket waits less
    often; a smaller one holds less on device and host, and leaves less work after backward.
    """
    resume: Literal["checkpoint", "last_step"] = "checkpoint"
    """After a crash training resumes from the user's own checkpoint, or from the last complete step: then
    each piece has two slots on SSD, which takes twice the space for the same bytes written, and every step
    ends with a flush of the drive.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return f"keeps optimizer state on SSD and updates on the host during backward{UPDATES[self.update]}"

    @property
    def effects(self) -> Effects:
        return Effects(
            calls="grad_hooks", eager_only=GRADIENTS_AT_END, keeps_steps=self.resume == "last_step"
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require a drive, gradients that are ready one by one, and a type of the native update."""
        step = program.step
        reason = cannot_offload_on_grad_ready(self, program, target) or no_directory(target)
        reason = reason or no_state_to_offload(step) or no_native_update(step, self.update, target)
        if reason is not None:
            return reason
        why_not = not_overlappable(step, _reducing_ranks(program, target))
        return Reason(why_not, "offload: {states: {kind: zero_infinity}}") if why_not else None

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Move state and masters to SSD; put copies, reads, updates and writes inside backward."""
        return program.with_step(
            optimizer_on_ssd_overlapped(
                program.step,
                self._bucket_bytes,
                _reducing_ranks(program, target),
                2 if self.effects.keeps_steps else 1,
                replicas_of(program, target),
            )
        )

    def apply(self, context: Context, plan: Plan) -> None:
        """Rebind the optimizer to tensors on SSD and add hooks that offload gradients."""
        offload_dir.checked()
        optimizer = SsdOverlappedOptimizer(
            context, master=self.update == "master", keep=self.effects.keeps_steps
        )
        context.checks["offload.states"] = GradientOffload(
            context, optimizer.check, self._bucket_bytes, "per_gradient", optimizer, expect=optimizer.expect
        ).check

    @property
    def _bucket_bytes(self) -> int:
        return int(self.bucket_mib * MIB)

    def record(self, target: Target) -> dict[str, Any]:
        knobs: dict[str, Any] = {"update": self.update, "bucket_bytes": self._bucket_bytes}
        knobs |= {"resume": self.resume} if self.effects.keeps_steps else {}
        return {
            "states.offload": {
                "optimizer": "ssd",
                "gradients": "grad_ready",
                "trigger": "per_gradient",
                **knobs,
            }
        }


def _reducing_ranks(program: Program, target: Target) -> int:
    """Return the ranks among which gradients are reduced in groups; replicas reduce each by itself."""
    return program.ranks if replicas_of(program, target) == 1 else 1
