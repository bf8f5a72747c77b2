"""Experts and their optimizer state on SSD, with a cache in host memory (SE-MoE / MoESys)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune import refusals
from memtune.effects import Effects
from memtune.offload.core import is_gathered
from memtune.offload.experts import (
    ExpertOffloadSpec,
    ExpertOptimizer,
    ExpertUnits,
    blocks_of_experts,
    experts_on_ssd,
    hide_dense_parameters,
    used_in,
)
from memtune.offload.parameters import BlockGradients, BlockUpdates, ParameterOffloader
from memtune.program import Program, Rule, gathers_of, window_residency
from memtune.runtime import Context
from memtune.search_spaces._support import conflict
from memtune.search_spaces.offload.states._common.layer_rules import EAGER_ONLY, cannot_run_on_ranks
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Plan, Reason, Target, Technique, no_directory
from memtune.units import format_bytes
from memtune.workload import Expert, experts_in, experts_of, frozen_expert_parameter


class MoesysPlan(Plan):
    """The step of the prediction; training does not need it."""

    experts: Annotated[int, Field(ge=0)] | None = None
    """Number of experts of the model."""
    used: Annotated[int, Field(ge=0)] | None = None
    """Number of experts that the predicted step uses."""
    max_peak_bytes: Annotated[int, Field(ge=0)] | None = None
    """Device peak in bytes of a step that uses all experts; none if the predicted one does."""


class Moesys(Technique):
    """Trades reads and writes of the experts that a step uses for the bytes of all experts, their gradients
    and state.

    Dense parameters are resident with the user's own optimizer. Experts lie on SSD with their moments; host
    memory caches `cache` of them, and the device holds those of `on_device` blocks. Experts of later blocks
    are prefetched from SSD and host, predicted by the last batch; an expert without routed tokens is not
    copied at all. The updates of a dense optimizer that it misses (moments decay, weights change) are
    replayed before its next use, so results are those of dense updates to the bit: AdamW's as torch's fused
    kernel computes it. A cache pays if few experts get most tokens; with many tokens for each, all are used
    in every step. Clipping by norm is detected and refused, since experts' gradients are offloaded.

    Under `fsdp` or `zero3` dense parameters are sharded on the device and experts on SSD: each rank reads,
    caches, updates and writes its rows of every expert, a part of all bytes, and FSDP2 gathers dense
    parameters and experts of a block in one message. So all experts are used there, and get the zero
    gradients of plain FSDP2. Replicas, each with all experts on its own SSD, are refused. Not implemented:
    expert parallelism, with tokens sent to the owners of experts.

    The prediction is for a step with the experts of the recorded one, if its routing cannot be an accident
    and there is one micro-batch on one rank; else for a step with all experts, an upper bound. `memtune
    explain` reports which.
    """

    kind: Literal["moesys"] = "moesys"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (MoesysPlan,)
    title: ClassVar[str] = "Experts and their optimizer state on SSD, cached in host memory"
    source: ClassVar[str] = (
        "Shen et al. 2022, SE-MoE: A Scalable and Efficient Mixture-of-Experts Distributed Training and"
        " Inference System, arXiv:2205.10034, section 3.1"
    )
    paper: ClassVar[str] = "SE-MoE"
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    cache: Annotated[int, Field(ge=1, le=1 << 20)] = 64
    """Experts in host memory, each with its moments."""
    eviction: Rule = "lfu"
    """Eviction rule: least frequently used, with decay (`lfu`), least recently used (`lru`), or furthest next
    use by the order of blocks (`belady`).
    """
    read_prefetch: Annotated[int, Field(ge=0, le=64)] = 2
    """Blocks by which experts are prefetched from SSD."""
    on_device: Annotated[int, Field(ge=1, le=64)] = 2
    """Blocks with resident experts; 2: the next one's are loaded while the current one computes."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return f"keeps experts and their optimizer state on SSD, {self.cache} of them in host memory"

    effects: ClassVar[Effects] = Effects(calls="expert_hooks", moves="expert", eager_only=EAGER_ONLY)
    """Only experts are offloaded."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require experts, a drive, and a chain of blocks, in float32; on ranks `fsdp`."""
        if target.compiled:
            return Reason(EAGER_ONLY, "execution.compile: false")
        if not (experts := experts_in(program.step)):
            if frozen := frozen_expert_parameter(program.step):
                return Reason(
                    f"no expert of the model is completely trained: {frozen} gets no gradient",
                    "train all of its parameters, or choose zero_infinity",
                )
            return refusals.no_experts()
        if (reason := no_directory(target)) is not None:
            return reason
        if gathers_of(program.step) is None and (reason := conflict(self, target, "recompute")) is not None:
            return reason
        return cannot_run_on_ranks(
            self, program.with_step(hide_dense_parameters(program.step, experts)), target
        )

    def plan(self, program: Program, target: Target) -> MoesysPlan:
        experts, used = experts_in(program.step), _used(program)
        max_peak_bytes = None if used == experts else self._on_ssd(program, experts).step.peak_bytes()
        return MoesysPlan(experts=len(experts), used=len(used), max_peak_bytes=max_peak_bytes)

    def rewrite(self, program: Program, plan: MoesysPlan, target: Target) -> Program:
        """Offload experts to SSD, through the cache, in a step that uses the experts of the recorded one."""
        return self._on_ssd(program, _used(program))

    def _on_ssd(self, program: Program, used: tuple[Expert, ...]) -> Program:
        step = program.step
        spec = ExpertOffloadSpec(self.cache, self.eviction, self.read_prefetch, self.on_device)
        return program.with_step(experts_on_ssd(step, experts_in(step), spec, used))

    def explain(self, plan: MoesysPlan) -> tuple[str, ...]:
        experts = plan.experts
        if plan.max_peak_bytes is not None:
            others = f"other batches may need up to {format_bytes(plan.max_peak_bytes)} on the device"
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
        """Move experts to SSD and add hooks that load them."""
        offload_dir.checked()
        experts, blocks = experts_of(context.model, context.blocks), len(context.blocks)
        if not experts:
            raise refusals.error_of(refusals.no_experts())
        optimizer = ExpertOptimizer(context, experts, self.cache, self.eviction, self.on_device)
        residency = window_residency(blocks, min(self.on_device, blocks), gathered=is_gathered(context.model))
        members = blocks_of_experts(context, optimizer)
        units = ExpertUnits(context, experts, members, optimizer, self.read_prefetch)
        gradients = BlockGradients(context, members)
        updates = BlockUpdates(context, optimizer, members, gradients)
        store = ParameterOffloader(context, residency, members, units, gradients, updates, optimizer.check)
        context.checks["offload.states"] = store.check

    def record(self, target: Target) -> dict[str, Any]:
        knobs: dict[str, Any] = {
            "cache": self.cache,
            "eviction": self.eviction,
            "read_prefetch": self.read_prefetch,
            "on_device": self.on_device,
        }
        return {
            "states.offload": {"experts": "ssd", "optimizer": "device", "trigger": "in_backward", **knobs}
        }


def _used(program: Program) -> tuple[Expert, ...]:
    """Return the experts that the predicted step uses."""
    # Each further micro-batch and other ranks' batches may use others, so these count all experts.
    experts = experts_in(program.step)
    return used_in(program.step, experts) if program.accumulate * program.ranks == 1 else experts
