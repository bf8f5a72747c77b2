"""Optimizer state on SSD with an updater process per storage domain (Smart-Infinity)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.effects import GRADIENTS_AT_END, NO_EFFECTS, Effects
from memtune.offload.near_storage import Updaters, UpdatersSpec, optimizer_on_updaters
from memtune.offload.optimizer import (
    UPDATES,
    GradientOffload,
    no_native_update,
    no_state_to_offload,
    not_contiguous,
)
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.grad_offload_technique import (
    cannot_offload_on_grad_ready,
    replicas_of,
)
from memtune.search_spaces.offload.states._common.layer_rules import NativelyUpdated
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Facts, Plan, Reason, Target, no_directory
from memtune.units import MIB


class SmartInfinity(NativelyUpdated):
    """Trades gradient and weight transfers to a process per drive for all traffic of optimizer state in the
    trainer.

    The paper's drives compute; here an updater process replaces one, on the cores of its drive's memory node,
    so results are emulated: state still crosses that drive's link, but not the trainer's. Flattened
    parameters are divided evenly over the domains, each of which reads, updates and writes its part sub-group
    by sub-group. In float32, 4 bytes per parameter go to the updaters in a step and 4 return, while
    `zero_infinity` reads and writes 12 each. If an updater dies, training ends with an error that names it.
    Each of several ranks has its own updaters, for its own parameters: under `zero1` and `fsdp` its shard.
    """

    kind: Literal["smart_infinity"] = "smart_infinity"
    title: ClassVar[str] = "Optimizer state with a process per drive, which updates it"
    source: ClassVar[str] = (
        "Jang et al. 2024, Smart-Infinity: Fast Large Language Model Training using Near-Storage Processing"
        " on a Real System, arXiv:2403.06664, SmartUpdate, its handler, SmartComp"
    )
    paper: ClassVar[str] = "Smart-Infinity"

    domains: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of updaters. With a list of offload directories (`/drive1:/drive2`) they are assigned
    round-robin; else all have a folder of their own in the one directory.
    """
    sub_group_mib: Annotated[float, Field(gt=0, le=65536)] = 64.0
    """Float32 weights read, updated and written together; with AdamW a buffer is three times as large."""
    buffers: Annotated[int, Field(ge=2, le=64)] = 3
    """Buffers of each updater in host memory: while one is updated the others are read and written."""
    topk_ratio: Annotated[float, Field(gt=0, le=0.25)] | None = None
    """Share of the gradients, the largest, that are sent with their indices (the paper: 0.01); the others are
    added to the next step's. Lossy, with evidence for fine-tuning only, and the device keeps one number per
    parameter for it. Default: all are sent.
    """
    gradients: Literal["step", "backward"] = "step"
    """Gradients are offloaded in the step, sub-group by sub-group, or in backward when they are ready, to
    host memory from which the step passes them on: then no gradient waits on the device, for the host bytes
    of all. The paper writes them to the drives in backward. Not with `topk_ratio`.
    """
    bucket_mib: Annotated[float, Field(ge=0, le=65536)] = 32.0
    """Gradients that are offloaded together in backward; the device holds at most two such buckets."""
    resume: Literal["checkpoint", "last_step"] = "checkpoint"
    """After a crash training resumes from the user's own checkpoint, or from the last complete step: then
    each sub-group has two slots on SSD, which takes twice the space for the same bytes written, and every
    step waits for all writes and a flush of each drive. Not with `topk_ratio`, whose unsent gradients are not
    on SSD.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        top = "" if self.topk_ratio is None else f", sends the largest {self.topk_ratio:.0%} of gradients"
        top += ", offloads gradients in backward" if self._in_backward else ""
        return f"keeps optimizer state on SSD, where a process per drive updates{top}{UPDATES[self.update]}"

    @property
    def effects(self) -> Effects:
        kept = self.resume == "last_step"
        if self._in_backward:
            return Effects(calls="grad_hooks", eager_only=GRADIENTS_AT_END, keeps_steps=kept)
        return Effects(keeps_steps=True) if kept else NO_EFFECTS

    @property
    def _in_backward(self) -> bool:
        return self.gradients == "backward"

    @property
    def _bucket_bytes(self) -> int:
        return int(self.bucket_mib * MIB)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require a drive, and parameters to update in a type of the native update."""
        step = program.step
        reason = no_directory(target) or self.refuses(Facts.of(program, target)) or no_state_to_offload(step)
        if reason is not None:
            return reason
        if self._in_backward and (reason := cannot_offload_on_grad_ready(self, program, target)) is not None:
            return reason
        if program.ranks == 1 and target.ranks == 1 and (reason := not_contiguous(step)) is not None:
            return reason
        return no_native_update(step, self.update, target)

    def refuses(self, facts: Facts) -> Reason | None:
        if self._in_backward and self.topk_ratio:
            return Reason("a share of the gradients is chosen on the device, in the step", "gradients: step")
        if self.effects.keeps_steps and self.topk_ratio:
            return Reason(
                "with a share of the gradients, the unsent ones are on the device only", "resume: checkpoint"
            )
        return None

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Move state to SSD; replace optimizer ops by transfers and the updaters' reads, updates, writes."""
        spec = UpdatersSpec(
            self.domains,
            self._sub_group_numel,
            self.buffers,
            self.topk_ratio,
            self._bucket_bytes if self._in_backward else None,
            2 if self.effects.keeps_steps else 1,
        )
        replicas = replicas_of(program, target)
        ranks = program.ranks if replicas == 1 else 1
        return program.with_step(optimizer_on_updaters(program.step, spec, ranks, replicas))

    def apply(self, context: Context, plan: Plan) -> None:
        """Start the updaters and rebind the optimizer to them."""
        roots = [str(offload_dir.checked(each)) for each in offload_dir.allowed_dirs() or (None,)]
        directories = [roots[domain % len(roots)] for domain in range(self.domains)]
        moved = Updaters(
            context,
            directories,
            master=self.update == "master",
            sub_group_numel=self._sub_group_numel,
            buffers=self.buffers,
            share=self.topk_ratio,
            on_host=self._in_backward,
            keep=self.effects.keeps_steps,
        )
        context.checks["offload.states"] = (
            GradientOffload(context, moved.check, self._bucket_bytes, "end_of_step").check
            if self._in_backward
            else moved.check
        )

    @property
    def _sub_group_numel(self) -> int:
        return max(int(self.sub_group_mib * MIB) // 4, 1)

    def record(self, target: Target) -> dict[str, Any]:
        knobs = {
            "optimizer": "updaters",
            "trigger": "end_of_step",
            "update": self.update,
            "domains": self.domains,
        }
        kept = {"resume": self.resume} if self.effects.keeps_steps else {}
        size: dict[str, Any] = {"sub_group_numel": self._sub_group_numel, "buffers": self.buffers}
        size |= {"gradients": "grad_ready", "bucket_bytes": self._bucket_bytes} if self._in_backward else {}
        return {
            "states.offload": {
                **knobs,
                **size,
                **({"topk_ratio": self.topk_ratio} if self.topk_ratio else {}),
                **kept,
            }
        }

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # A share of the gradients is lossy: never proposed.
        return {"update": ("native", "master"), "gradients": ("step", "backward")}

    def exactly(self) -> Exactness:
        return Exactness.LOSSY if self.update == "master" or self.topk_ratio else Exactness.REORDERED
