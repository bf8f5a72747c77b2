"""Optimizer state on SSD with an updater process per storage domain (Smart-Infinity)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune import refusals
from memtune.offload.near_storage import Updaters, UpdatersSpec, optimizer_on_updaters
from memtune.offload.optimizer import UPDATES, no_native_update, not_contiguous
from memtune.program import Kind, Program
from memtune.runtime import Context
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Plan, Reason, Target, Technique, no_directory
from memtune.units import MIB


class SmartInfinity(Technique):
    """Trades gradient and weight transfers to a process per drive for all traffic of optimizer state in the
    trainer.

    The paper's drives compute; here an updater process replaces one, on the cores of its drive's memory node,
    so results are emulated: state still crosses that drive's link, but not the trainer's. Flattened
    parameters are divided evenly over the domains, each of which reads, updates and writes its part sub-group
    by sub-group. In float32, 4 bytes per parameter go to the updaters in a step and 4 return, while
    `zero_infinity` reads and writes 12 each. If an updater dies, training ends with an error that names it.
    Each of several ranks has its own updaters, for its own parameters: under `zero1` and `fsdp` its shard.

    Distinguishing test: bytes between trainer and updaters are gradients plus weights; every updater is a
    process with its own file and an equal part of the state; weights are sent, then written, before moments
    are.
    """

    kind: Literal["smart_infinity"] = "smart_infinity"
    slot: ClassVar[str] = "offload.states"
    title: ClassVar[str] = "Optimizer state with a process per drive, which updates it"
    source: ClassVar[str] = (
        "Jang et al. 2024, Smart-Infinity: Fast Large Language Model Training using Near-Storage Processing"
        " on a Real System, arXiv:2403.06664, SmartUpdate, its handler, SmartComp"
    )
    paper: ClassVar[str] = "Smart-Infinity"
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    update: Literal["native", "master"] = "native"
    """`native` is for float32 parameters and has the bits of torch's fused AdamW; `master` keeps float32
    masters for bfloat16 parameters, on SSD as well.
    """
    domains: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of updaters. With a list of offload directories (`/drive1:/drive2`) they are assigned
    round-robin; else all have a folder of their own in the one directory.
    """
    sub_group_mib: Annotated[float, Field(gt=0, le=65536)] = 64.0
    """Float32 weights that are read, updated and written at once; with AdamW a buffer has three times this
    size.
    """
    buffers: Annotated[int, Field(ge=2, le=64)] = 3
    """Buffers of each updater in host memory: while one is updated the others are read and written."""
    topk_ratio: Annotated[float, Field(gt=0, le=0.25)] | None = None
    """Share of the gradients, the largest, that are sent with their indices (the paper: 0.01); the others are
    added to the next step's. Lossy, with evidence for fine-tuning only, and the device keeps one number per
    parameter for it. Default: all are sent.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        top = "" if self.topk_ratio is None else f", sends the largest {self.topk_ratio:.0%} of gradients"
        return f"keeps optimizer state on SSD, where a process per drive updates{top}{UPDATES[self.update]}"

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require a drive, and parameters to update in a type of the native update."""
        if (reason := no_directory(target)) is not None:
            return reason
        step = program.step
        if (
            not any(each.gradient >= 0 for each in step.parameters)
            or not (step.storages.kind == Kind.OPTIMIZER).any()
        ):
            return refusals.no_optimizer_state()
        if program.ranks == 1 and target.ranks == 1 and (reason := not_contiguous(step)) is not None:
            return reason
        return no_native_update(step, self.update, target)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Move state to SSD; replace the optimizer's ops with transfers, and the updaters' reads, updates and
        writes.
        """
        how = UpdatersSpec(self.domains, self._sub_group_numel, self.buffers, self.topk_ratio)
        return program.with_step(optimizer_on_updaters(program.step, how))

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
            share=self.topk_ratio,
        )
        context.checks["offload.states"] = moved.check

    @property
    def _sub_group_numel(self) -> int:
        return max(int(self.sub_group_mib * MIB) // 4, 1)

    def record(self, target: Target) -> dict[str, Any]:
        """Return the place, the parts and the update of the state."""
        how = {
            "optimizer": "updaters",
            "trigger": "end_of_step",
            "update": self.update,
            "domains": self.domains,
        }
        size = {"sub_group_numel": self._sub_group_numel, "buffers": self.buffers}
        return {
            "states.offload": {**how, **size, **({"topk_ratio": self.topk_ratio} if self.topk_ratio else {})}
        }

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Return one update for each type of parameter; sending a share of the gradients is never
        proposed.
        """
        return {"update": ("native", "master")}

    def exactly(self) -> Exactness:
        """Return lossy with masters, and with a share of the gradients."""
        return Exactness.LOSSY if self.update == "master" or self.topk_ratio else Exactness.REORDERED
