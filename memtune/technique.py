"""What a technique is: one published way to save memory, as a frozen record of knobs with five verbs.

`fits` says whether it may be used, `plan` decides what must be decided, `rewrite` does it to a Program, `env` says what
must be set before the device starts, `apply` does it to the live model. What of a pass must come after all others is in
`finish`. Neither `rewrite` nor `apply` ever solves anything: what they need to know is in the plan.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from memtune.runtime import offload_dir

if TYPE_CHECKING:
    from memtune.hardware import Hardware
    from memtune.program import OptimizerFacts, Program, Recording
    from memtune.runtime.context import Context


CompileScope = Literal[False, "blocks", "model"]
"""What torch.compile is applied to: nothing, each block by itself, or the whole model."""


class Exactness(StrEnum):
    """How the results of a technique relate to those of the plain model (design rule 1)."""

    BITWISE = "bitwise"
    """Same ops, same order, same random numbers: every gradient is equal to the bit."""
    REORDERED = "reordered"
    """Equal up to the order of summation."""
    LOSSY = "lossy"
    """Not equal; only used when the user allows it."""


@dataclass(frozen=True)
class Reason:
    """Why a technique may not be used here; data for the user, not an exception."""

    text: str
    fix: str = ""

    def __str__(self) -> str:
        """`text`, and the fix where there is one."""
        return f"{self.text} ({self.fix})" if self.fix else self.text


@dataclass(frozen=True)
class Target:
    """What a program is to run on: the machine, the ranks, the budget, and what the other axes have chosen."""

    hardware: Hardware
    ranks: int = 1
    budget_bytes: int | None = None
    chosen: Mapping[str, Technique] = field(default_factory=dict)
    """Techniques by slot (`sharding.states`), as chosen in the candidate at hand."""
    compiled: CompileScope = False
    """What of the model runs compiled."""
    compile_backend: str = "inductor"
    """Whose kernels run what is compiled."""
    offload_dir: str = field(default_factory=offload_dir.allowed)
    """Where tensors may go on SSD; empty: nowhere."""
    cut: CutRecordings | None = None
    """Records the step of one rank with layers cut over ranks; None where nobody asked for such steps."""
    whole: Target | None = None
    """The target of all ranks, where this one is of those that hold the same part (`among_copies`)."""
    optimizer: OptimizerFacts | None = None
    """What the user's optimizer cannot do; None where nobody asked it."""

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return self.hardware.device

    def group_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks that make equal groups, smaller than all: parts of a node, a node, several nodes; largest first."""
        node = self.hardware.local_ranks(self.ranks)
        whole = (size for size in range(self.ranks // 2, 1, -1) if self.ranks % size == 0)
        return tuple(size for size in whole if size % node == 0 or node % size == 0)

    def among_copies(self, parts: int) -> Target:
        """This target as the ranks see it that hold the same one of `parts` parts of a model: every `parts`-th rank."""
        return replace(self, hardware=_spread(self.hardware, parts), ranks=self.ranks // parts, whole=self)

    @property
    def parts(self) -> int:
        """Of how many parts of a model these ranks hold the same one."""
        return 1 if self.whole is None else self.whole.ranks // self.ranks


@functools.lru_cache(maxsize=64)
def _spread(hardware: Hardware, parts: int) -> Hardware:
    return replace(hardware, gpus_per_node=max(hardware.gpus_per_node // parts, 1))


CutRecordings = Callable[[int, str, int], "CutRecording | Reason"]
"""From degree, what is cut (as the technique's `what` says) and number of ranks to the recorded step, or why there is none."""


@dataclass(frozen=True, eq=False)
class CutRecording:
    """A rank's step with layers cut over a group of ranks, recorded from the real mechanism."""

    recording: Recording
    decisions: Mapping[str, Any]
    """Which layers, for the plan."""


def no_directory(target: Target) -> Reason | None:
    """Why nothing may go to SSD on `target`: nobody said where. Whether the directory can be used is looked at when it is."""
    if target.offload_dir:
        return None
    return Reason("no directory for tensors on SSD was given", f"--offload-dir, or {offload_dir.VARIABLE}")


class Plan(BaseModel):
    """What a technique decided for one program and target: plain data, stored with the config."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    decisions: dict[str, Any] = {}

    @property
    def sha256(self) -> str:
        """Hash of the decisions, compared by all ranks before training."""
        return hashlib.sha256(json.dumps(self.decisions, sort_keys=True).encode()).hexdigest()


NO_PLAN = Plan()


class Technique(BaseModel):
    """Base of every technique. The stem of the file is the `kind`; the folder is the slot; the fields are the knobs."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: str
    slot: ClassVar[str]
    """Where it goes in a config: `recompute`, `sharding.states`, `offload.activations`, …"""
    title: ClassVar[str]
    source: ClassVar[str]
    """Paper or project it comes from; for memtune's own, what it stands on."""
    exactness: ClassVar[Exactness]
    eager_only: ClassVar[str] = ""
    """Why it cannot work beside torch.compile (it needs a dispatch mode, or the model's own ops); empty where it can."""

    among_copies: ClassVar[bool] = False
    """It works among the ranks that hold the same part of a model, of which it divides or gathers states: it sees these alone as
    `ranks`."""
    every_micro_batch: ClassVar[bool] = False
    """It gathers or reduces in every micro-batch: on the stages of a pipeline as well."""
    averages: ClassVar[bool] = False
    """It averages gradients over all ranks itself, so that `sharding.states: none` is right on several."""
    weights_stay: ClassVar[bool] = False
    """Of `offload.states`: whether no weight leaves the device for certain; only how much host memory is refused follows."""
    averages_blocks: ClassVar[bool] = False
    """Beside `ddp` it averages gradients of the blocks itself, as they land; `ddp` has those of what is in no block."""
    averages_experts: ClassVar[bool] = False
    """The same of experts alone."""
    averages_landed: ClassVar[bool] = False
    """Beside `ddp` each gradient is averaged as it lands, since this technique takes it away then; its pass writes that down."""

    layer_major: ClassVar[bool] = False
    """It runs packs of blocks, one after the other, each over all micro-batches."""

    def packs_in(self, plan: Plan, blocks: int) -> tuple[tuple[int, int], ...]:
        """Where it is layer-major: first block and the one after the last of each pack that runs backward, in forward order."""
        return ()

    def follows_calls(self) -> bool:
        """Whether it acts when blocks are called and as their gradients land.

        A schedule of the whole model would run past it; a schedule for each block leaves the blocks' calls alone.
        """
        return self.averages_blocks or self.averages_landed or self.layer_major

    def ranks_of_a_copy(self, ranks: int) -> int:
        """Of `ranks`, the consecutive ones that hold one copy of the model together, each a part of it."""
        return 1

    def exactly(self) -> Exactness:
        """The class of exactness with these knobs; `exactness` is that of the defaults."""
        return self.exactness

    def fits(self, program: Program, target: Target) -> Reason | None:
        """None, or why it may not be used on `program` with `target` (which holds what the other axes chose)."""
        return None

    def plan(self, program: Program, target: Target) -> Plan:
        """Decide what must be decided; solved once, in the search."""
        return NO_PLAN

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """The pass: `program` as it is under this technique."""
        return program

    def finish(self, program: Program, plan: Plan, target: Target) -> Program | Reason:
        """What of the pass comes after those of all other slots, on `program` as they left it; or why that cannot be."""
        return program

    def env(self) -> dict[str, str]:
        """Environment variables that must be set before the device starts."""
        return {}

    def partitioning(self) -> dict[str, Any]:
        """What AOTAutograd's partitioner is told while graphs are made; the program is recorded from graphs so made."""
        return {}

    def apply(self, context: Context, plan: Plan) -> None:
        """Do it to the live model in `context`, through a mechanism of `memtune.runtime`."""

    def explain(self, plan: Plan) -> tuple[str, ...]:
        """What `plan` decided, in lines for people; none for an empty or damaged plan."""
        return ()

    def record(self, target: Target) -> dict[str, Any]:
        """The mechanism settings this expands to; techniques with equal records are one candidate."""
        raise TypeError(f"{type(self).__name__} must say which mechanism settings it stands for")

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Values worth trying for each knob, first the default; the search may add others that `fits` allows."""
        return {}

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """As `choices`, where the values worth trying follow from the ranks and nodes of `target`."""
        return self.choices()

    def is_tried(self) -> bool:
        """Whether a search tries these of the values in `choices`: not where they are what another technique does."""
        return True

    def divides_parameters(self, ranks: int, plan: Plan) -> bool:
        """Whether `apply` divides the parameters over some of `ranks`, and can do so before they have values."""
        return False

    def least_share_on_host(self) -> float:
        """Of the optimizer's state, what is in host memory whatever the plan says; `apply` sees beforehand that it has room."""
        return 0.0

    def keeps_steps(self) -> bool:
        """Whether a run that ended is taken up from SSD, where its bytes are beside those of the run that goes on."""
        return False

    def knobs(self) -> Iterator[tuple[str, Any]]:
        """Name and value of every field but `kind`."""
        for name in type(self).model_fields:
            if name != "kind":
                yield name, getattr(self, name)
