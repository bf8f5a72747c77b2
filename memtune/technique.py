"""What a technique is: one published way to save memory, as a frozen record of knobs with five verbs.

`fits` says whether it may be used, `plan` decides what must be decided (a `Plan`, typed per technique),
`rewrite` does it to a Program, `env` says what must be set before the device starts, `apply` does it to the
live model. `effects` declares what other axes must know of it. `passes` declares the passes by stage:
`rewrite` alone, or with one that runs after those of all axes. Neither a pass nor `apply` ever solves
anything: what they need to know is in the plan.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from memtune.effects import NO_EFFECTS, Effects
from memtune.errors import ApplyError
from memtune.ssd import offload_dir

if TYPE_CHECKING:
    from memtune.hardware import Hardware
    from memtune.program import OptimizerFacts, Program, Recording
    from memtune.runtime import Context


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
    code: str = "MT315"
    """Of the error where `apply` refuses for this reason."""

    def __str__(self) -> str:
        """`text`, and the fix where there is one."""
        return f"{self.text} ({self.fix})" if self.fix else self.text


@dataclass(frozen=True)
class Target:
    """What a program is to run on: the machine, the ranks, the budget, and what the other axes have
    chosen.
    """

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
        """Numbers of ranks that make equal groups, smaller than all: parts of a node, a node, several nodes;
        largest first.
        """
        node = self.hardware.local_ranks(self.ranks)
        whole = (size for size in range(self.ranks // 2, 1, -1) if self.ranks % size == 0)
        return tuple(size for size in whole if size % node == 0 or node % size == 0)

    def among_copies(self, parts: int) -> Target:
        """This target as the ranks see it that hold the same one of `parts` parts of a model: every
        `parts`-th rank.
        """
        return replace(self, hardware=_spread(self.hardware, parts), ranks=self.ranks // parts, whole=self)

    @property
    def parts(self) -> int:
        """Of how many parts of a model these ranks hold the same one."""
        return 1 if self.whole is None else self.whole.ranks // self.ranks


@functools.lru_cache(maxsize=64)
def _spread(hardware: Hardware, parts: int) -> Hardware:
    return replace(hardware, gpus_per_node=max(hardware.gpus_per_node // parts, 1))


@dataclass(frozen=True)
class Facts:
    """The facts of a config that the search and `apply` both know; `apply` has them before it changes the
    model.
    """

    chosen: Mapping[str, Technique]
    """Techniques by slot; null techniques may be left out."""
    ranks: int
    compiled: CompileScope
    compile_backend: str
    blocks: int
    """Repeated blocks of the model."""

    @classmethod
    def of(cls, program: Program, target: Target) -> Facts:
        """The facts of a candidate in the search."""
        return cls(
            target.chosen, target.ranks, target.compiled, target.compile_backend, len(program.step.blocks)
        )


CutRecordings = Callable[[int, str, int], "CutRecording | Reason"]
"""From degree, what is cut (as the technique's `what` says) and number of ranks to the recorded step, or why
there is none.
"""


@dataclass(frozen=True, eq=False)
class CutRecording:
    """A rank's step with layers cut over a group of ranks, recorded from the real mechanism."""

    recording: Recording
    fields: Mapping[str, Any]
    """Fields of the plan: which layers, over how many ranks."""


def no_directory(target: Target) -> Reason | None:
    """Why nothing may go to SSD on `target`: nobody said where. Whether the directory can be used is looked
    at when it is.
    """
    if target.offload_dir:
        return None
    return Reason("no directory for tensors on SSD was given", f"--offload-dir, or {offload_dir.VARIABLE}")


class Plan(BaseModel):
    """Base of what a technique decided for one program and target; every technique that plans declares the
    fields of its own.

    A config holds the fields under `plan: {<slot>: …}`; the loader checks them once, against the technique in
    the slot. Only checks that need the live model (number of blocks, names of parameters) are left to
    `apply`. Units are in the fields' names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def document(self) -> dict[str, Any]:
        """Return the fields as plain data, the form they have in a config; fields at their defaults are left
        out.
        """
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def is_empty(self) -> bool:
        """Whether every field is at its default, so that a config need not hold this plan."""
        fields = type(self).model_fields
        return all(getattr(self, name) == field.default for name, field in fields.items())

    @property
    def sha256(self) -> str:
        """Hash of the document, compared by all ranks before training."""
        return hashlib.sha256(json.dumps(self.document(), sort_keys=True).encode()).hexdigest()


NO_PLAN = Plan()


class PassStage(IntEnum):
    """When a pass runs: within a stage passes run in the order of their axes, and the next stage begins after
    the last one.
    """

    AXES = 0
    """Passes that work on what the axes before have made of the program; the first pass of every technique.
    """
    WHOLE_STEP = 1
    """Passes on the step with all axes in it: collectives after the states' own reductions, the cut into
    pipeline stages.
    """


Rewrite = Callable[["Program", Any, Target], "Program | Reason"]
"""A pass: from a program, the technique's plan and the target to the program under the technique, or why that
cannot be.
"""


class Technique(BaseModel):
    """Base of every technique. The stem of the file is the `kind`; the folder is the slot; the fields are the
    knobs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: str
    slot: ClassVar[str]
    """Where it goes in a config: `recompute`, `sharding.states`, `offload.activations`, …"""
    plan_types: ClassVar[tuple[type[Plan], ...]] = ()
    """Types of the plans that `plan` makes; several where plans have several forms, none where nothing is
    planned.
    """
    title: ClassVar[str]
    source: ClassVar[str]
    """Paper or project it comes from; for memtune's own, what it stands on."""
    exactness: ClassVar[Exactness]

    @property
    def effects(self) -> Effects:
        """Return its effects on a step that other axes must know, with these knobs."""
        return NO_EFFECTS

    def ranks_of_a_copy(self, ranks: int) -> int:
        """Of `ranks`, the consecutive ones that hold one copy of the model together, each a part of it."""
        return 1

    def exactly(self) -> Exactness:
        """The class of exactness with these knobs; `exactness` is that of the defaults."""
        return self.exactness

    def refuses(self, facts: Facts) -> Reason | None:
        """Return why it may not be used with `facts`, in addition to the rules on effects; `fits` and `apply`
        ask this.
        """
        return None

    def fits(self, program: Program, target: Target) -> Reason | None:
        """None, or why it may not be used on `program` with `target` (which holds what the other axes
        chose).
        """
        return None

    def plan(self, program: Program, target: Target) -> Plan:
        """Decide what must be decided; solved once, in the search."""
        return NO_PLAN

    @classmethod
    def plan_from(cls, document: Mapping[str, Any]) -> Plan:
        """Return the plan that `document`, plain data of a config, holds: of the type with the most of its
        keys.

        Raises:
            ValidationError: A field is missing, unknown or malformed.
        """
        types = cls.plan_types or (Plan,)
        best = max(types, key=lambda each: len(each.model_fields.keys() & document.keys()))
        return best.model_validate_json(json.dumps(document))

    def plan_in(self, plans: Mapping[str, Plan]) -> Plan:
        """Return the plan of this technique's slot in `plans`, its empty plan where there is none.

        Raises:
            ApplyError: There is none, and a plan of this technique cannot be empty.
        """
        if self.slot in plans:
            return plans[self.slot]
        if not self.plan_types:
            return NO_PLAN
        try:
            return self.plan_types[0]()
        except ValidationError as error:
            missing = ", ".join(str(each["loc"][0]) for each in error.errors() if each["loc"])
            raise ApplyError(
                f"{self.slot}: {{kind: {self.kind}}} needs a plan, and the config has none.",
                evidence=f"plan: {{{self.slot}: …}} would say {missing}.",
                fix=(
                    "memtune search  writes it with the config, memtune trial --config  makes one; "
                    f"or choose {self.slot}: {{kind: none}}"
                ),
                code="MT316",
            ) from error

    def rewrite(self, program: Program, plan: Any, target: Target) -> Program:
        """The pass: `program` as it is under this technique."""
        return program

    def passes(self) -> Mapping[PassStage, Rewrite]:
        """Return the passes by stage; `search_spaces._pass_pipeline` runs all of one stage before those of
        the next.
        """
        return {PassStage.AXES: self.rewrite}

    def env(self) -> dict[str, str]:
        """Environment variables that must be set before the device starts."""
        return {}

    def partitioning(self) -> dict[str, Any]:
        """What AOTAutograd's partitioner is told while graphs are made; the program is recorded from graphs
        so made.
        """
        return {}

    def apply(self, context: Context, plan: Any) -> None:
        """Do it to the live model in `context`, through a mechanism of `memtune.runtime`."""

    def explain(self, plan: Any) -> tuple[str, ...]:
        """Return lines that say for people what `plan` decided; none for an empty plan."""
        return ()

    def record(self, target: Target) -> dict[str, Any]:
        """The mechanism settings this expands to; techniques with equal records are one candidate."""
        raise TypeError(f"{type(self).__name__} must say which mechanism settings it stands for")

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Values worth trying for each knob, first the default; the search may add others that `fits`
        allows.
        """
        return {}

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """As `choices`, where the values worth trying follow from the ranks and nodes of `target`."""
        return self.choices()

    def is_tried(self) -> bool:
        """Whether a search tries these of the values in `choices`: not where they are what another technique
        does.
        """
        return True

    def divides_parameters(self, ranks: int, plan: Any) -> bool:
        """Whether `apply` divides the parameters over some of `ranks`, and can do so before they have
        values.
        """
        return False

    def knobs(self) -> Iterator[tuple[str, Any]]:
        """Name and value of every field but `kind`."""
        for name in type(self).model_fields:
            if name != "kind":
                yield name, getattr(self, name)
