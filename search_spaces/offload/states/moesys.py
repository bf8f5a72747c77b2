"""Experts and their optimizer state on SSD behind a cache in host memory (SE-MoE / MoESys, Shen et al.
2022).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.offload.core import gathers_of, is_gathered
from memtune.offload.experts import ExpertOptimizer, ExpertStore, How, experts_on_ssd, only_experts, used_in
from memtune.program import Program, Rule, window
from memtune.runtime import Context
from memtune.search_spaces._support import conflict
from memtune.search_spaces.offload.states._common import EAGER_ONLY, cannot_run_on_ranks, replicas
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Plan, Reason, Target, Technique, no_directory
from memtune.units import format_bytes
from memtune.workload import Expert, experts_in, experts_of, frozen_in


class MoesysPlan(Plan):
    """The step that the prediction is of; nothing of it is needed to train."""

    experts: Annotated[int, Field(ge=0)] | None = None
    """Experts of the model."""
    used: Annotated[int, Field(ge=0)] | None = None
    """Experts that the predicted step uses."""
    most_bytes: Annotated[int, Field(ge=0)] | None = None
    """Peak of the device, in bytes, of a step that uses all experts; none where the predicted one does."""


class Moesys(Technique):
    """Trades reads and writes of the experts that a step uses for the bytes of all experts, their gradients
    and their state.

    Dense parameters stay on the device with the user's own optimizer. Experts lie on SSD with their moments;
    host memory caches as many as `cache`, the device has those of `on_device` blocks. Experts of blocks to
    come are read from SSD and copied up ahead, by what the last batch used; an expert that no row is sent to
    is not moved at all. What a dense optimizer would do to it meanwhile (its moments decay, its weights go
    on) is made up for before it is used next, so results are those of dense updates to the bit: AdamW's as
    torch's fused kernel computes it. A cache pays where few experts get most rows; with many rows for each,
    all are used in every step. Clipping by norm is noticed and refused: experts' gradients have left.

    Under `fsdp` or `zero3` parameters are divided over ranks, dense ones on the device and experts on SSD:
    each rank reads, keeps in its cache, updates and writes its rows of every expert, a part of all bytes, and
    FSDP2 gathers dense parameters and experts of a block in one message. So all experts are used there, and
    get the zeros that FSDP2 alone gives them. Beside `ddp` each rank has all experts on an SSD of its own,
    and gradients of an expert that any rank has used are averaged before it is updated. Not in it: expert
    parallelism, with rows sent to the owners of experts.

    Predicted is a step that uses the experts which the recorded one does, where its routing cannot be an
    accident and there is one micro-batch on one rank; else a step that uses them all, an upper end. `memtune
    explain` says which.

    Distinguishing test: bytes read and written are those of the experts that were used and not in the cache,
    none of the others'; with the cache off, or without the replay of missed updates, bytes or bits differ.
    """

    kind: Literal["moesys"] = "moesys"
    slot: ClassVar[str] = "offload.states"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (MoesysPlan,)
    title: ClassVar[str] = "Experts and their optimizer state on SSD, cached in host memory"
    source: ClassVar[str] = (
        "Shen et al. 2022, SE-MoE: A Scalable and Efficient Mixture-of-Experts Distributed Training and"
        " Inference System, arXiv:2205.10034, section 3.1"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    cache: Annotated[int, Field(ge=1, le=1 << 20)] = 64
    """Experts that host memory holds, each with its moments."""
    rule: Rule = "lfu"
    """Which expert goes where there is no room: used least often lately (`lfu`, what is long ago counts
    less), used longest ago (`lru`), or used again last of all by the order of blocks (`belady`).
    """
    ahead: Annotated[int, Field(ge=0, le=64)] = 2
    """Blocks whose experts are read from SSD ahead."""
    on_device: Annotated[int, Field(ge=1, le=64)] = 2
    """Blocks whose experts are on the device: with 2 those of the next one come up while the current one
    computes.
    """
    resume: Literal["checkpoint", "last_step"] = "checkpoint"
    """After a crash training goes on from the user's own checkpoint, or from the last complete step: then
    experts have two slots on SSD, and so has all else that is trained. Each step writes the experts that it
    has changed and all of the rest, and ends with a flush of the drive.
    """

    @property
    def effects(self) -> Effects:
        """Experts alone come and go."""
        return Effects(
            averages="experts",
            calls="expert_hooks",
            moves="expert",
            eager_only=EAGER_ONLY,
            keeps_steps=self.resume == "last_step",
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs experts, a drive, and blocks that run one after the other, in float32; several ranks: `fsdp`,
        or replicas.
        """
        if target.compiled:
            return Reason(EAGER_ONLY, "execution.compile: false")
        if not (experts := experts_in(program.step)):
            if frozen := frozen_in(program.step):
                return Reason(
                    f"no expert of the model is trained whole: {frozen} gets no gradient",
                    "train all of it, or choose zero_infinity",
                )
            return Reason(
                "the model has no experts: modules of a block, in a list whose name says so, all with equal"
                " parameters"
            )
        if (reason := no_directory(target)) is not None:
            return reason
        if gathers_of(program.step) is None and (reason := conflict(self, target, "recompute")) is not None:
            return reason
        return cannot_run_on_ranks(self, program.with_step(only_experts(program.step, experts)), target)

    def plan(self, program: Program, target: Target) -> MoesysPlan:
        """How many experts the prediction is of, and what the device needs where a step uses them all."""
        experts, used = experts_in(program.step), _used(program)
        most_bytes = None if used == experts else self._on_ssd(program, experts).step.peak_bytes()
        return MoesysPlan(experts=len(experts), used=len(used), most_bytes=most_bytes)

    def rewrite(self, program: Program, plan: MoesysPlan, target: Target) -> Program:
        """Experts to SSD, through the cache to the device and back, in a step that uses those that the
        recorded one does.
        """
        return self._on_ssd(program, _used(program))

    def _on_ssd(self, program: Program, used: tuple[Expert, ...]) -> Program:
        step, how = (
            program.step,
            How(self.cache, self.rule, self.ahead, self.on_device, self.effects.keeps_steps),
        )
        return program.with_step(experts_on_ssd(step, experts_in(step), how, used, replicas(program)))

    def explain(self, plan: MoesysPlan) -> tuple[str, ...]:
        """Which step was predicted, and what others may need."""
        experts = plan.experts
        if plan.most_bytes is not None:
            others = f"other batches may need up to {format_bytes(plan.most_bytes)} on the device"
            return (
                (
                    f"predicted for steps that use {plan.used} of {experts} experts, as the recorded batch"
                    f" does; {others}"
                ),
            )
        return (
            (f"predicted for steps that use all {experts} experts; those that use fewer need less",)
            if experts
            else ()
        )

    def apply(self, context: Context, plan: MoesysPlan) -> None:
        """Experts to SSD, hooks that bring them in."""
        offload_dir.checked()
        experts, blocks = experts_of(context.model, context.blocks), len(context.blocks)
        if not experts:
            raise ApplyError(
                "The model has no experts.", fix="offload: {states: {kind: zero_infinity}}", code="MT381"
            )
        optimizer = ExpertOptimizer(
            context, experts, self.cache, self.rule, self.on_device, self.effects.keeps_steps
        )
        residency = window(blocks, min(self.on_device, blocks), gathered=is_gathered(context.model))
        store = ExpertStore(context, experts, residency, optimizer, self.ahead)
        context.checks["offload.states"] = store.check

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of experts and of all else, and what is kept where."""
        how: dict[str, Any] = {
            "cache": self.cache,
            "rule": self.rule,
            "ahead": self.ahead,
            "on_device": self.on_device,
        }
        how |= {"resume": self.resume} if self.effects.keeps_steps else {}
        return {"states.offload": {"experts": "ssd", "optimizer": "device", "trigger": "in_backward", **how}}


def _used(program: Program) -> tuple[Expert, ...]:
    """The experts that the predicted step uses; each further micro-batch, and each other rank's, may use
    others.
    """
    experts = experts_in(program.step)
    return used_in(program.step, experts) if program.accumulate * program.ranks == 1 else experts
