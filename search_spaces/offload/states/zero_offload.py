"""Offload gradients in buckets in backward, with optimizer state and update on the host (ZeRO-Offload)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from memtune import refusals
from memtune.effects import GRADIENTS_AT_END, Effects
from memtune.errors import ApplyError
from memtune.offload.optimizer import (
    UPDATES,
    Moments,
    OffloadTiming,
    cannot_part,
    no_native_update,
    no_state_to_offload,
    overlap_optimizer,
    overlap_optimizer_partly,
)
from memtune.program import Program, Step
from memtune.runtime import Context
from memtune.search_spaces._support import conflict
from memtune.search_spaces.offload.states._common.grad_offload_technique import (
    apply_on_grad_ready,
    cannot_offload_on_grad_ready,
    native_of,
    replicas_of,
)
from memtune.search_spaces.offload.states._common.layer_rules import NativelyUpdated
from memtune.search_spaces.offload.states._common.state_ratio import RatioSolution, smallest_ratio
from memtune.technique import Exactness, Plan, Reason, Target
from memtune.units import MIB, format_bytes


class ZeroOffloadPlan(Plan):
    """Part of the optimizer's state on the host, if the config gives none."""

    ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    """Part of the bytes; none if the knob has it."""
    resident_parameters: Annotated[int, Field(ge=0)] | None = None
    """Parameters whose state is resident, those used first."""
    trained: Annotated[int, Field(ge=0)] | None = None
    """Parameters that are trained."""


class ZeroOffload(NativelyUpdated):
    """Trades a D2H copy of the gradients during backward and an H2D copy of the weights in the step for their
    bytes and the state's.

    The device keeps weights, activations and two buckets of gradients. In bfloat16 (`master`) 4 bytes per
    parameter cross the link in a step, in float32 8; with accumulation the gradients cross it in each
    micro-batch. The host sums micro-batches and updates when the last gradient has arrived. On several ranks
    each sends its rows of reduced gradients, with `fsdp`, `zero3`, `zero1` or `zero2` (the paper's), and its
    host updates these alone. With `delayed` the update overlaps with the next step: weights have a staleness
    of one step, which is declared knobs and off by default. Clipping by norm between backward and step is
    refused, since the gradients are offloaded.
    """

    kind: Literal["zero_offload"] = "zero_offload"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (ZeroOffloadPlan,)
    title: ClassVar[str] = "Gradients to the host during backward, updated there"
    source: ClassVar[str] = (
        "Ren et al. 2021, ZeRO-Offload: Democratizing Billion-Scale Model Training, arXiv:2101.06840,"
        " sections 4.1 and 5.2"
    )
    paper: ClassVar[str] = "ZeRO-Offload"

    moments: Moments = "float32"
    """Type in which the host stores moments; narrow ones are knobs."""
    bucket_mib: Annotated[float, Field(ge=0, le=65536)] = 32.0
    """Gradients that are offloaded together; the device holds at most two such buckets. A larger bucket waits
    less often, a smaller one holds less and begins earlier.
    """
    ratio: Annotated[float, Field(ge=0, le=1)] | None = 1.0
    """Part of the bytes whose optimizer state is on the host (ZeRO-Offload++'s Twin-Flow). Parameters used
    first keep theirs on the device, where the user's own optimizer updates them: their gradients are ready
    last and are waited for most. None: the smallest part under which the step stays within the budget.
    """
    delayed: bool = False
    """Each update overlaps with the next step (section 5.2, one-step delayed parameter update)."""
    delay_after: Annotated[int, Field(ge=0)] = 40
    """Steps without delay at the beginning of a run: the paper delays once training has settled."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        share = "as little as needed" if self.ratio is None else f"{self.ratio:.0%}"
        state = "optimizer state" if self.ratio == 1 else f"{share} of the optimizer state"
        delay = " one step late" if self.delayed else ""
        sent = "sends gradients to host memory in backward"
        return f"{sent}, keeps {state} and updates there{delay}{UPDATES[self.update]}"

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.ratio != 1.0 and self.update == "master":
            raise ValueError("float32 masters are on the host: set ratio: 1.0, or update: native")
        return self

    @property
    def effects(self) -> Effects:
        # Before a ratio is solved, no part of the state is known to be on the host.
        return Effects(calls="grad_hooks", eager_only=GRADIENTS_AT_END, host_share=self.ratio or 0.0)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require gradients ready one by one, reduced on several ranks, and a type of the native update."""
        step = program.step
        if (reason := no_state_to_offload(step)) is not None:
            return reason
        if self.ratio != 1.0 and (why_not := self._cannot_part(step, target)):
            return Reason(why_not, "ratio: 1.0")
        reason = cannot_offload_on_grad_ready(self, program, target, self.ratio or 1.0)
        reason = reason or no_native_update(step, self.update, target)
        return reason or (self._not_solved(program, target) if self.ratio is None else None)

    @staticmethod
    def _cannot_part(step: Step, target: Target) -> str:
        return cannot_part(step) or ("" if target.optimizer is None else target.optimizer.not_one_by_one)

    def _not_solved(self, program: Program, target: Target) -> Reason | None:
        """Return why there is no smallest part, or a simpler setting with the same effect."""
        if target.budget_bytes is None:
            return Reason("there is no budget to solve the ratio for", "--max-memory 20GiB, or ratio: 0.5")
        if (reason := conflict(self, target, "recompute", "offload.activations")) is not None:
            return reason
        if program.step.peak_bytes() <= target.budget_bytes:
            return refusals.fits_already("offload: {states: {kind: none}}")
        found = self._solved(program, target.budget_bytes, replicas_of(program, target))
        if found.least_bytes > target.budget_bytes:
            least = format_bytes(found.least_bytes)
            return Reason(
                f"no optimizer state fits on the device: without any the step needs {least}", "ratio: 1.0"
            )
        if not found.resident:
            return Reason("no parameter's optimizer state fits on the device", "ratio: 1.0")
        return cannot_offload_on_grad_ready(self, program, target, found.ratio)

    def _solved(self, program: Program, budget_bytes: int, replicas: int) -> RatioSolution:
        return smallest_ratio(program, native_of(self.moments), self._early(replicas), budget_bytes)

    def _early(self, replicas: int) -> OffloadTiming:
        return OffloadTiming(self._bucket_bytes, delayed=self.delayed, replicas=replicas)

    def plan(self, program: Program, target: Target) -> ZeroOffloadPlan:
        if self.ratio is not None or target.budget_bytes is None:
            return ZeroOffloadPlan()
        found = self._solved(program, target.budget_bytes, replicas_of(program, target))
        return ZeroOffloadPlan(ratio=found.ratio, resident_parameters=found.resident, trained=found.trained)

    def explain(self, plan: ZeroOffloadPlan) -> tuple[str, ...]:
        if plan.ratio is None:
            return ()
        resident = f"that of {plan.resident_parameters} of {plan.trained} parameters is on the device"
        return (f"{plan.ratio:.0%} of the state on the host; {resident}",)

    def _ratio(self, plan: ZeroOffloadPlan) -> float:
        """Return the ratio of the config or the plan.

        Raises:
            ApplyError: The config gives no ratio and has no plan.
        """
        ratio = plan.ratio if self.ratio is None else self.ratio
        if ratio is None:
            raise ApplyError(
                "zero_offload has no ratio.",
                evidence="The config has none, and no plan.",
                fix="offload: {states: {kind: zero_offload, ratio: 0.5}}, or plan it again",
                code="MT364",
            )
        return ratio

    def rewrite(self, program: Program, plan: ZeroOffloadPlan, target: Target) -> Program:
        """Add D2H copies in backward, state and update on the host, H2D copies in this step or the next."""
        early, ratio = self._early(replicas_of(program, target)), self._ratio(plan)
        if ratio < 1.0:
            return program.with_step(
                overlap_optimizer_partly(program.step, native_of(self.moments), early, program.ranks, ratio)
            )
        return program.with_step(
            overlap_optimizer(program.step, native_of(self.moments), early, program.ranks)
        )

    def apply(self, context: Context, plan: ZeroOffloadPlan) -> None:
        """Rebind the optimizer to host copies of its parameters and add hooks that offload gradients."""
        delay_after, ratio = self.delay_after if self.delayed else None, self._ratio(plan)
        apply_on_grad_ready(
            context, self.update, self.moments, self._bucket_bytes, "end_of_step", delay_after, ratio
        )

    @property
    def _bucket_bytes(self) -> int:
        return int(self.bucket_mib * MIB)

    def record(self, target: Target) -> dict[str, Any]:
        trigger = "one_step_delayed" if self.delayed else "end_of_step"
        how = {"update": self.update, "moments": self.moments, "bucket_bytes": self._bucket_bytes}
        knobs: dict[str, Any] = {"delay_after": self.delay_after} if self.delayed else {}
        knobs |= {"ratio": "smallest" if self.ratio is None else self.ratio} if self.ratio != 1.0 else {}
        return {
            "states.offload": {
                "optimizer": "host",
                "gradients": "grad_ready",
                "trigger": trigger,
                **how,
                **knobs,
            }
        }

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # Lossy delay and narrow moments are never proposed.
        return {"update": ("native", "master"), "ratio": (1.0, None)}

    def exactly(self) -> Exactness:
        narrow = self.update == "master" or self.moments != "float32"
        return Exactness.LOSSY if narrow or self.delayed else Exactness.REORDERED
