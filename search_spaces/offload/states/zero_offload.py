"""Gradients to the host in buckets during backward, optimizer state and update there (ZeRO-Offload, Ren et al. 2021)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from memtune.errors import ApplyError
from memtune.passes.gradients_down import Early, optimizer_beside_backward
from memtune.passes.partly_down import partly_beside_backward
from memtune.passes.stays import cannot_part
from memtune.program import Kind, Program, Step
from memtune.runtime.context import Context
from memtune.runtime.host_update import Moments
from memtune.search_spaces.offload.states._as_they_land import apply_as_they_land, native_of, not_as_they_land, replicas_of
from memtune.search_spaces.offload.states._native_update import no_native_update
from memtune.search_spaces.offload.states._ratio import Found, smallest_ratio
from memtune.technique import NO_PLAN, Exactness, Plan, Reason, Target, Technique
from memtune.units import MIB, format_bytes

_BY_BUDGET = ("planned", "lohan", "tsplit", "pipelined")
"""What decides before how much of the budget is left."""


class ZeroOffload(Technique):
    """Trades a copy of the gradients down during backward, and of the weights up in the step, for theirs and the state's bytes.

    The device keeps weights, activations and two buckets of gradients. 4 bytes per parameter cross the link in a step in bfloat16
    (`master`), 8 in float32; with accumulation the gradients do so in each micro-batch. The host adds micro-batches up and
    updates when the last gradient is there. On several ranks each sends the rows that it has of reduced gradients, beside `fsdp`,
    `zero3`, `zero1` or `zero2` (the paper's), and its host updates these alone. With `delayed` it updates beside the next step
    instead: weights are one step old, which is declared lossy and off by default. Clipping by norm between backward and step is
    refused: the gradients have left.

    Distinguishing test: the copies of all buckets but the last begin before backward has ended, each holding `bucket_mib`, and
    the device holds at most two; delayed, a step's update comes before the forward of the next one and weights are one step old.
    """

    kind: Literal["zero_offload"] = "zero_offload"
    slot: ClassVar[str] = "offload.states"
    title: ClassVar[str] = "Gradients to the host during backward, updated there"
    source: ClassVar[str] = (
        "Ren et al. 2021, ZeRO-Offload: Democratizing Billion-Scale Model Training, arXiv:2101.06840, sections 4.1 and 5.2"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    averages_landed: ClassVar[bool] = True
    weights_stay: ClassVar[bool] = True
    eager_only: ClassVar[str] = "compiled graphs hand their gradients over at their end, not as they are made"

    update: Literal["native", "master"] = "native"
    """`native` is for float32 parameters and has the bits of torch's fused AdamW; `master` keeps float32 masters for bfloat16
    parameters, as the paper does for float16."""
    moments: Moments = "float32"
    """How the host stores moments; narrow ones are lossy."""
    bucket_mib: Annotated[float, Field(ge=0, le=65536)] = 32.0
    """Gradients that go down together; the device holds two such buckets at most. A larger one waits less often, a smaller one
    holds less and begins earlier."""
    ratio: Annotated[float, Field(ge=0, le=1)] | None = 1.0
    """Part of the bytes whose optimizer state is on the host (ZeRO-Offload++'s Twin-Flow). The parameters that come first keep
    theirs on the device, where the user's own optimizer updates them: their gradients land last and are waited for most. None:
    the smallest part under which the step stays within the budget."""
    delayed: bool = False
    """Each update runs beside the next step (section 5.2, one-step delayed parameter update)."""
    delay_after: Annotated[int, Field(ge=0)] = 40
    """Steps that are not delayed, at the beginning of a run: the paper switches over when training has settled."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.ratio != 1.0 and self.update == "master":
            raise ValueError("float32 masters are on the host: set ratio: 1.0, or update: native")
        return self

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs gradients that land one by one, reduced on several ranks, and a type that the native update knows."""
        step = program.step
        if not any(each.gradient >= 0 for each in step.parameters) or not (step.kind == Kind.OPTIMIZER).any():
            return Reason("the optimizer has no state to move")
        if self.ratio != 1.0 and (why_not := self._cannot_part(step, target)):
            return Reason(why_not, "ratio: 1.0")
        reason = not_as_they_land(program, target, self.ratio or 1.0) or self._not_late(target)
        reason = reason or no_native_update(step, self.update, target)
        return reason or (self._not_solved(program, target) if self.ratio is None else None)

    @staticmethod
    def _cannot_part(step: Step, target: Target) -> str:
        return cannot_part(step) or ("" if target.optimizer is None else target.optimizer.not_one_by_one)

    def _not_solved(self, program: Program, target: Target) -> Reason | None:
        """Why there is no smallest part, or another setting says the same."""
        if target.budget_bytes is None:
            return Reason("there is no budget to solve the ratio for", "--max-memory 20GiB, or ratio: 0.5")
        for slot in ("recompute", "offload.activations"):
            if (other := target.chosen.get(slot)) is not None and other.kind in _BY_BUDGET:
                return Reason(f"{other.kind} plans for the same budget, and what it leaves is not known before", "ratio: 1.0")
        if program.step.peak_bytes() <= target.budget_bytes:
            return Reason("everything fits into the budget as it is", "offload: {states: {kind: none}}")
        found = self._solved(program, target.budget_bytes, replicas_of(program, target))
        if found.least_bytes > target.budget_bytes:
            least = format_bytes(found.least_bytes)
            return Reason(f"nothing of the state has room on the device: without it the step needs {least}", "ratio: 1.0")
        if not found.staying:
            return Reason("no parameter's state has room on the device", "ratio: 1.0")
        return not_as_they_land(program, target, found.ratio)

    def _solved(self, program: Program, budget_bytes: int, replicas: int) -> Found:
        return smallest_ratio(program, native_of(self.moments), self._early(replicas), budget_bytes)

    def _early(self, replicas: int) -> Early:
        return Early(self._bucket_bytes, late=self.delayed, replicas=replicas)

    def plan(self, program: Program, target: Target) -> Plan:
        """The ratio, where none is given."""
        if self.ratio is not None or target.budget_bytes is None:
            return NO_PLAN
        found = self._solved(program, target.budget_bytes, replicas_of(program, target))
        return Plan(decisions={"ratio": found.ratio, "staying": found.staying, "trained": found.trained})

    def explain(self, plan: Plan) -> tuple[str, ...]:
        """How much stays on the device."""
        match plan.decisions:
            case {"ratio": float(ratio), "staying": int(staying), "trained": int(trained)}:
                return (f"{ratio:.0%} of the state on the host; that of {staying} of {trained} parameters stays on the device",)
        return ()

    def _ratio(self, plan: Plan) -> float:
        """What is given, or planned.

        Raises:
            ApplyError: The config has no plan, or a damaged one.
        """
        ratio = plan.decisions.get("ratio") if self.ratio is None else self.ratio
        if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise ApplyError(
                "zero_offload has no ratio.", evidence=f"The plan says {ratio}.",
                fix="offload: {states: {kind: zero_offload, ratio: 0.5}}, or plan it again", code="MT364",
            )  # fmt: skip
        return ratio

    def _not_late(self, target: Target) -> Reason | None:
        states = target.chosen.get("sharding.states") if self.delayed and target.ranks > 1 else None
        if states is None or states.kind not in ("zero1", "zero2"):
            return None
        return Reason(f"delayed weights would be late in other ranks' whole ones under {states.kind}", "sharding.states: fsdp")

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Copies down in backward, state and update to the host, weights up in the step; where delayed, a later step."""
        early, ratio = self._early(replicas_of(program, target)), self._ratio(plan)
        if ratio < 1.0:
            return program.with_step(partly_beside_backward(program.step, native_of(self.moments), early, program.ranks, ratio))
        return program.with_step(optimizer_beside_backward(program.step, native_of(self.moments), early, program.ranks))

    def apply(self, context: Context, plan: Plan) -> None:
        """Rebind the optimizer to host copies of its parameters, hooks that send gradients down."""
        late_after, ratio = self.delay_after if self.delayed else None, self._ratio(plan)
        apply_as_they_land(context, self.update, self.moments, self._bucket_bytes, "end_of_step", late_after, ratio)

    @property
    def _bucket_bytes(self) -> int:
        return int(self.bucket_mib * MIB)

    def least_share_on_host(self) -> float:
        """What is not left on the device; nothing of it is known before a ratio is solved for."""
        return self.ratio or 0.0

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of the state, when gradients go down and when the update runs."""
        trigger = "one_step_late" if self.delayed else "end_of_step"
        how = {"update": self.update, "moments": self.moments, "bucket_bytes": self._bucket_bytes}
        late: dict[str, Any] = {"late_after": self.delay_after} if self.delayed else {}
        late |= {"ratio": "smallest" if self.ratio is None else self.ratio} if self.ratio != 1.0 else {}
        return {"states.offload": {"optimizer": "host", "gradients": "as_they_land", "trigger": trigger, **how, **late}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """One way for each type of parameter, all or the smallest part of it; what is lossy beyond masters is never proposed."""
        return {"update": ("native", "master"), "ratio": (1.0, None)}

    def exactly(self) -> Exactness:
        """Lossy with masters, narrow moments or delay."""
        narrow = self.update == "master" or self.moments != "float32"
        return Exactness.LOSSY if narrow or self.delayed else Exactness.REORDERED
