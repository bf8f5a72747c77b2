"""Gradients to the host in buckets during backward, optimizer state and update there (ZeRO-Offload, Ren et al. 2021)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from memtune.passes.gradients_down import Early, optimizer_beside_backward
from memtune.passes.partly_down import partly_beside_backward
from memtune.passes.stays import cannot_part
from memtune.program import Kind, Program
from memtune.runtime.context import Context
from memtune.runtime.host_update import Moments
from memtune.search_spaces.offload.states._as_they_land import apply_as_they_land, native_of, not_as_they_land
from memtune.search_spaces.offload.states._native_update import no_native_update
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import MIB


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
    eager_only: ClassVar[str] = "compiled graphs hand their gradients over at their end, not as they are made"

    update: Literal["native", "master"] = "native"
    """`native` is for float32 parameters and has the bits of torch's fused AdamW; `master` keeps float32 masters for bfloat16
    parameters, as the paper does for float16."""
    moments: Moments = "float32"
    """How the host stores moments; narrow ones are lossy."""
    bucket_mib: Annotated[float, Field(ge=0, le=65536)] = 32.0
    """Gradients that go down together; the device holds two such buckets at most. A larger one waits less often, a smaller one
    holds less and begins earlier."""
    ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Part of the bytes whose optimizer state is on the host (ZeRO-Offload++'s Twin-Flow). The parameters that come first keep
    theirs on the device, where the user's own optimizer updates them: their gradients land last and are waited for most."""
    delayed: bool = False
    """Each update runs beside the next step (section 5.2, one-step delayed parameter update)."""
    delay_after: Annotated[int, Field(ge=0)] = 40
    """Steps that are not delayed, at the beginning of a run: the paper switches over when training has settled."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.ratio < 1.0 and self.update == "master":
            raise ValueError("float32 masters are on the host: set ratio: 1.0, or update: native")
        return self

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs gradients that land one by one, reduced on several ranks, and a type that the native update knows."""
        step = program.step
        if not any(each.gradient >= 0 for each in step.parameters) or not (step.kind == Kind.OPTIMIZER).any():
            return Reason("the optimizer has no state to move")
        if self.ratio < 1.0 and (why_not := cannot_part(step)):
            return Reason(why_not, "ratio: 1.0")
        return not_as_they_land(program, target, self.ratio) or self._not_late(target) or no_native_update(step, self.update)

    def _not_late(self, target: Target) -> Reason | None:
        states = target.chosen.get("sharding.states") if self.delayed and target.ranks > 1 else None
        if states is None or states.kind not in ("zero1", "zero2"):
            return None
        return Reason(f"delayed weights would be late in other ranks' whole ones under {states.kind}", "sharding.states: fsdp")

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Copies down in backward, state and update to the host, weights up in the step; where delayed, a later step."""
        early = Early(self._bucket_bytes, late=self.delayed)
        if self.ratio < 1.0:
            return program.with_step(
                partly_beside_backward(program.step, native_of(self.moments), early, program.ranks, self.ratio)
            )
        return program.with_step(optimizer_beside_backward(program.step, native_of(self.moments), early, program.ranks))

    def apply(self, context: Context, plan: Plan) -> None:
        """Rebind the optimizer to host copies of its parameters, hooks that send gradients down."""
        late_after = self.delay_after if self.delayed else None
        apply_as_they_land(context, self.update, self.moments, self._bucket_bytes, "end_of_step", late_after, self.ratio)

    @property
    def _bucket_bytes(self) -> int:
        return int(self.bucket_mib * MIB)

    def least_share_on_host(self) -> float:
        """What is not left on the device."""
        return self.ratio

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of the state, when gradients go down and when the update runs."""
        trigger = "one_step_late" if self.delayed else "end_of_step"
        how = {"update": self.update, "moments": self.moments, "bucket_bytes": self._bucket_bytes}
        late: dict[str, Any] = {"late_after": self.delay_after} if self.delayed else {}
        late |= {"ratio": self.ratio} if self.ratio < 1.0 else {}
        return {"states.offload": {"optimizer": "host", "gradients": "as_they_land", "trigger": trigger, **how, **late}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """One way for each type of parameter; what is lossy beyond masters is never proposed."""
        return {"update": ("native", "master")}

    def exactly(self) -> Exactness:
        """Lossy with masters, narrow moments or delay."""
        narrow = self.update == "master" or self.moments != "float32"
        return Exactness.LOSSY if narrow or self.delayed else Exactness.REORDERED
