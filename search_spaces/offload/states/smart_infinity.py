"""One updater process per storage domain owns its part of the optimizer's state on SSD (Smart-Infinity, Jang
et al. 2024).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.effects import Effects
from memtune.offload.near_storage import How, Updaters, optimizer_with_updaters
from memtune.program import Kind, Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common import no_native_update, not_rows
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique, no_directory
from memtune.units import MIB


class SmartInfinity(Technique):
    """Trades gradients out and weights in, shared with a process per drive, for all optimizer state that the
    trainer would move.

    The paper's drives compute; here an updater process stands for one, on the cores of its drive's memory
    node, so what it shows is emulated: state still crosses that drive's link, but nothing of it the
    trainer's. Parameters, flattened, are divided evenly over the domains, each of which reads, updates and
    writes its part sub-group by sub-group. In float32, 4 bytes per parameter go to the updaters in a step and
    4 come back, where `zero_infinity` moves 12 and 12 besides. An updater that dies ends training with its
    name. Each of several ranks has updaters of its own, for what it holds: under `zero1` and `fsdp` its part.

    Distinguishing test: bytes between trainer and updaters are gradients plus weights; every updater is a
    process with a file of its own and an equal part of the state; weights are handed over, then written,
    before moments are.
    """

    kind: Literal["smart_infinity"] = "smart_infinity"
    slot: ClassVar[str] = "offload.states"
    title: ClassVar[str] = "Optimizer state with a process per drive, which updates it"
    source: ClassVar[str] = (
        "Jang et al. 2024, Smart-Infinity: Fast Large Language Model Training using Near-Storage Processing"
        " on a Real System, arXiv:2403.06664, SmartUpdate, its handler, SmartComp"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    update: Literal["native", "master"] = "native"
    """`native` is for float32 parameters and has the bits of torch's fused AdamW; `master` keeps float32
    masters for bfloat16 parameters, on SSD as well.
    """
    domains: Annotated[int, Field(ge=1, le=64)] = 2
    """Updaters. Where the offload directory is a list (`/drive1:/drive2`) they go round it; else all have a
    folder of their own in the one directory.
    """
    sub_group_mib: Annotated[float, Field(gt=0, le=65536)] = 64.0
    """Float32 weights that are read, updated and written at once; with AdamW three times this is a buffer."""
    buffers: Annotated[int, Field(ge=2, le=64)] = 3
    """Of each updater, in host memory: while one is updated the others are read and written."""
    share: Annotated[float, Field(gt=0, le=0.25)] | None = None
    """Of the gradients, the largest, that are sent with their places (the paper: 0.01); the others are added
    to the next step's. Lossy, with evidence for fine-tuning only, and the device keeps one number per
    parameter for it. Default: all are sent.
    """
    resume: Literal["checkpoint", "last_step"] = "checkpoint"
    """After a crash training goes on from the user's own checkpoint, or from the last complete step: then
    each sub-group has two slots on SSD, which takes twice the space for the same bytes written, and every
    step waits for all writes and a flush of each drive. Not with `share`, whose unsent gradients are nowhere
    on SSD.
    """

    @property
    def effects(self) -> Effects:
        """Steps are kept with `resume: last_step`."""
        return Effects(keeps_steps=self.resume == "last_step")

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs a drive, and something to update in a type that the native update knows."""
        if (reason := no_directory(target) or self.refuses(Facts.of(program, target))) is not None:
            return reason
        step = program.step
        if (
            not any(each.gradient >= 0 for each in step.parameters)
            or not (step.storages.kind == Kind.OPTIMIZER).any()
        ):
            return Reason("the optimizer has no state to move")
        if program.ranks == 1 and target.ranks == 1 and (reason := not_rows(step)) is not None:
            return reason
        return no_native_update(step, self.update, target)

    def refuses(self, facts: Facts) -> Reason | None:
        """`resume` with gradients that are not all sent."""
        if self.effects.keeps_steps and self.share:
            return Reason(
                "with a share of the gradients, those that wait are on the device alone", "resume: checkpoint"
            )
        return None

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """State to SSD; reads, updates and writes of updaters in place of the optimizer's ops, gradients and
        weights between.
        """
        how = How(
            self.domains,
            self._sub_group_numel,
            self.buffers,
            self.share,
            2 if self.effects.keeps_steps else 1,
        )
        return program.with_step(optimizer_with_updaters(program.step, how))

    def apply(self, context: Context, plan: Plan) -> None:
        """Start the updaters and rebind the optimizer to them."""
        roots = [str(offload_dir.checked(each)) for each in offload_dir.all_allowed() or (None,)]
        directories = [roots[domain % len(roots)] for domain in range(self.domains)]
        moved = Updaters(
            context,
            directories,
            master=self.update == "master",
            sub_group_numel=self._sub_group_numel,
            buffers=self.buffers,
            share=self.share,
            keep=self.effects.keeps_steps,
        )
        context.checks["offload.states"] = moved.check

    @property
    def _sub_group_numel(self) -> int:
        return max(int(self.sub_group_mib * MIB) // 4, 1)

    def record(self, target: Target) -> dict[str, Any]:
        """Where the state is, in how many parts, and how it is updated."""
        how = {
            "optimizer": "updaters",
            "trigger": "end_of_step",
            "update": self.update,
            "domains": self.domains,
        }
        kept = {"resume": self.resume} if self.effects.keeps_steps else {}
        size = {"sub_group_numel": self._sub_group_numel, "buffers": self.buffers}
        return {"states.offload": {**how, **size, **({"share": self.share} if self.share else {}), **kept}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """One way for each type of parameter; leaving gradients for later is never proposed."""
        return {"update": ("native", "master")}

    def exactly(self) -> Exactness:
        """Lossy with masters, and where only some gradients are sent."""
        return Exactness.LOSSY if self.update == "master" or self.share else Exactness.REORDERED
