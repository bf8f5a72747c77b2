"""Optimizer state on SSD, streamed through the host while it steps (ZeRO-Infinity, Rajbhandari et al. 2021)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.passes.ssd_optimizer import optimizer_on_ssd
from memtune.program import Kind, Program
from memtune.runtime import offload_dir
from memtune.runtime.context import Context
from memtune.runtime.ssd_optimizer import SsdOptimizer
from memtune.search_spaces.offload.states._native_update import no_native_update
from memtune.technique import Exactness, Plan, Reason, Target, Technique, no_directory


class ZeroInfinity(Technique):
    """Trades a read and a write of all optimizer state per step for its bytes on device and host.

    Master weights and moments lie on SSD, each parameter's in one piece. While one native pass updates a parameter, the pieces of
    the next ones are read and those of the last ones written, so host memory holds a few pieces whatever the model's size.
    24 bytes per parameter cross the drive in a step with AdamW; drives wear, so what is written is shown.

    Distinguishing test: 12 bytes per parameter are read and 12 written in a step, the read of the third parameter begins before
    the first is updated, and host memory holds no more pieces than are on their way.
    """

    kind: Literal["zero_infinity"] = "zero_infinity"
    slot: ClassVar[str] = "offload.states"
    title: ClassVar[str] = "Optimizer state on SSD, updated on the host"
    source: ClassVar[str] = (
        "Rajbhandari et al. 2021, ZeRO-Infinity: Breaking the GPU Memory Wall, arXiv:2104.07857, section 5.2.2"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    update: Literal["native", "master"] = "native"
    """`native` is for float32 parameters and has the bits of torch's fused AdamW; `master` keeps float32 masters for bfloat16
    parameters, on SSD as well."""
    ahead: Annotated[int, Field(ge=0, le=64)] = 3
    """Pieces that are read ahead; each takes the bytes of a parameter's state on the host."""
    resume: Literal["checkpoint", "last_step"] = "checkpoint"
    """After a crash training goes on from the user's own checkpoint, or from the last complete step: then each piece has two
    slots on SSD, which takes twice the space for the same bytes written, and every step ends with a flush of the drive."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs a directory on a drive, and something to update in a type that the native update knows."""
        if (reason := no_directory(target)) is not None:
            return reason
        step = program.step
        if not any(each.gradient >= 0 for each in step.parameters) or not (step.kind == Kind.OPTIMIZER).any():
            return Reason("the optimizer has no state to move")
        return no_native_update(step, self.update)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """State and masters to SSD; reads, updates and writes in place of the optimizer's ops."""
        return program.with_step(optimizer_on_ssd(program.step, self.ahead, 2 if self._keeps else 1))

    def apply(self, context: Context, plan: Plan) -> None:
        """Rebind the optimizer to tensors on SSD."""
        offload_dir.checked()
        moved = SsdOptimizer(context, master=self.update == "master", ahead=self.ahead, keep=self._keeps)
        context.checks["offload.states"] = moved.check

    @property
    def _keeps(self) -> bool:
        return self.resume == "last_step"

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of the state, and how it is updated."""
        how = {"optimizer": "ssd", "trigger": "end_of_step", "update": self.update, "ahead": self.ahead}
        return {"states.offload": {**how, **({"resume": self.resume} if self._keeps else {})}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """One way for each type of parameter."""
        return {"update": ("native", "master")}

    def exactly(self) -> Exactness:
        """Lossy with masters: it trains as bfloat16 with float32 masters does, not as the user's optimizer."""
        return Exactness.LOSSY if self.update == "master" else Exactness.REORDERED
