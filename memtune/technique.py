"""Base class of techniques: a published way to save memory, as a frozen record of knobs.

- `fits` returns a reason why it may not be used, or None.
- `plan` decides what must be decided (a `Plan`, typed per technique).
- `rewrite` predicts its effect on a Program; `passes` declares it, and later passes, by stage.
- `env` returns variables that must be set before the device starts.
- `apply` puts it into effect on the live model.
- `effects` declares what other axes must know of it.

Passes and `apply` never solve anything: all decisions are in the plan.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from memtune.device import Capability
from memtune.effects import NO_EFFECTS, Effects
from memtune.errors import ApplyError
from memtune.ssd import offload_dir

if TYPE_CHECKING:
    from memtune.device import Platform
    from memtune.hardware import Hardware
    from memtune.program import OptimizerFacts, Program, Recording
    from memtune.runtime import Context


CompileScope = Literal[False, "blocks", "model"]
"""Scope of torch.compile: nothing, each block by itself, or the whole model."""


class Exactness(StrEnum):
    """Relation of a technique's results to those of the plain model (design rule 1)."""

    BITWISE = "bitwise"
    """Same ops, same order, same random numbers: every gradient is equal to the bit."""
    REORDERED = "reordered"
    """Equal up to the order of summation."""
    LOSSY = "lossy"
    """Not equal; used only if the user allows it."""


@dataclass(frozen=True)
class ComputePrecision:
    """Types in which units of the model compute if they differ from those of their parameters (FSDP2's
    `MixedPrecisionPolicy`).
    """

    param_dtype: str
    """Type of parameters and activations in forward and backward."""
    output_dtype: str | None = None
    """Type to which the model's floating-point outputs are cast; None: as they are."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs of a unit to `param_dtype`."""


@dataclass(frozen=True)
class Reason:
    """A reason why a technique may not be used, as data for the user; not an exception."""

    text: str
    fix: str = ""
    code: str = "MT315"
    """Code of the error that `apply` raises for this reason."""

    def __str__(self) -> str:
        """Return `text`, with the fix if there is one."""
        return f"{self.text} ({self.fix})" if self.fix else self.text


@dataclass(frozen=True)
class Target:
    """The target of a program: machine, ranks, budget, and the techniques of the other axes."""

    hardware: Hardware
    ranks: int = 1
    budget_bytes: int | None = None
    chosen: Mapping[str, Technique] = field(default_factory=dict)
    """Techniques by slot (`sharding.states`) of the present candidate."""
    compiled: CompileScope = False
    """Part of the model that runs compiled."""
    compile_backend: str = "inductor"
    """Backend of torch.compile that makes the kernels."""
    offload_dir: str = field(default_factory=offload_dir.allowed)
    """Directories for tensors on SSD; empty if SSD is not allowed."""
    sharded: ShardedRecordings | None = None
    """Function that records one rank's step with layers sharded over ranks; None if none is needed."""
    recorded_kinds: frozenset[str] | None = None
    """Techniques of `sharding.parallel` whose steps are recorded and planned; None for all."""
    whole: Target | None = None
    """The target of all ranks, if this one is of the ranks that hold the same part (`among_copies`)."""
    optimizer: OptimizerFacts | None = None
    """Limitations of the user's optimizer; None if they were not recorded."""

    @property
    def device(self) -> str:
        """Torch's device type, such as `cpu` or `cuda`."""
        return self.hardware.device

    def plans_parallel(self, kind: str) -> bool:
        """Return True if steps are recorded for the technique `kind` of `sharding.parallel`."""
        return self.sharded is not None and (self.recorded_kinds is None or kind in self.recorded_kinds)

    def group_sizes(self) -> tuple[int, ...]:
        """Return the sizes of equal groups of ranks, largest first: several nodes, a node, or parts of one;
        less than all ranks.
        """
        node = self.hardware.local_ranks(self.ranks)
        whole = (size for size in range(self.ranks // 2, 1, -1) if self.ranks % size == 0)
        return tuple(size for size in whole if size % node == 0 or node % size == 0)

    def among_copies(self, parts: int) -> Target:
        """Return this target as seen by the ranks that hold one of `parts` parts of a model: every `parts`-th
        rank.
        """
        return replace(self, hardware=_spread(self.hardware, parts), ranks=self.ranks // parts, whole=self)

    @property
    def parts(self) -> int:
        """Number of parts that a model is divided into; the ranks of this target hold the same one."""
        return 1 if self.whole is None else self.whole.ranks // self.ranks


@functools.lru_cache(maxsize=64)
def _spread(hardware: Hardware, parts: int) -> Hardware:
    return replace(hardware, gpus_per_node=max(hardware.gpus_per_node // parts, 1))


@dataclass(frozen=True)
class Facts:
    """Facts of a config that the search and `apply` share; `apply` knows them before it changes the model."""

    chosen: Mapping[str, Technique]
    """Techniques by slot; null techniques may be omitted."""
    ranks: int
    compiled: CompileScope
    compile_backend: str
    blocks: int
    """Number of repeated blocks of the model."""
    platform: Platform | None = None
    """The device's type and runtime; None if the device is not known."""
    inner_optimizers: tuple[str, ...] = ()
    """Classes of the optimizers that the user's one steps."""

    @classmethod
    def of(cls, program: Program, target: Target) -> Facts:
        """Return the facts of a candidate in the search."""
        return cls(
            target.chosen,
            target.ranks,
            target.compiled,
            target.compile_backend,
            len(program.step.blocks),
            target.hardware.platform,
            () if target.optimizer is None else target.optimizer.inner,
        )


ShardedRecordings = Callable[[int, str, int], "ShardedRecording | Reason"]
"""Function from degree, kind of sharding and ranks to the recorded step, or why there is none."""


@dataclass(frozen=True, eq=False)
class ShardedRecording:
    """A rank's step with layers sharded over a group of ranks, recorded from the real mechanism."""

    recording: Recording
    fields: Mapping[str, Any]
    """Fields of the plan: the layers that are sharded, and over how many ranks."""


def lacking(platform: Platform, needs: Iterable[Capability]) -> Reason | None:
    """Return why `platform` has not all that is needed, or None.

    CPU is never asked: a device's settings have no effect there, and a config may name them.
    """
    missing = [] if platform.is_host else [each for each in needs if each not in platform.capabilities]
    if not missing:
        return None
    return Reason(
        f"missing on {platform.title}: {missing[0]}", f"`memtune doctor` lists what {platform.name} lacks"
    )


def no_directory(target: Target) -> Reason | None:
    """Return the reason why `target` has no SSD: no directory was given. The directory itself is checked at
    its first use.
    """
    if target.offload_dir:
        return None
    return Reason("no directory for tensors on SSD was given", f"--offload-dir, or {offload_dir.VARIABLE}")


class Plan(BaseModel):
    """Base of plans: the decisions of a technique for one program and target, with fields declared per
    technique.

    A config holds the fields under `plan: {<slot>: …}`. The loader validates them once against the technique
    in the slot; only checks that need the live model (number of blocks, parameter names) remain for `apply`.
    Field names contain their units.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def document(self) -> dict[str, Any]:
        """Return the fields as plain data, as they are in a config, without those at their defaults."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def is_empty(self) -> bool:
        """True if every field is at its default, so that a config need not hold this plan."""
        fields = type(self).model_fields
        return all(getattr(self, name) == field.default for name, field in fields.items())

    @property
    def schedule_calls(self) -> int:
        """Number of calls a micro-batch that run a schedule instead of the model's code; 0 without one."""
        return 0

    @property
    def sha256(self) -> str:
        """Hash of the document; all ranks compare it before training."""
        return hashlib.sha256(json.dumps(self.document(), sort_keys=True).encode()).hexdigest()


NO_PLAN = Plan()


class PassStage(IntEnum):
    """Stage of a pass. Passes of a stage run in the order of their axes, before those of the next stage."""

    AXES = 0
    """Passes on the result of the axes before them; the first pass of every technique."""
    WHOLE_STEP = 1
    """Passes on the step with all axes: collectives after reductions of states, or the cut into stages."""


Rewrite = Callable[["Program", Any, Target], "Program | Reason"]
"""A pass: from a program, the technique's plan and the target to the new program, or why there is none."""


_CATALOGUE = "memtune.search_spaces"


class Technique(BaseModel):
    """Base of every technique. Its file's stem is the `kind`, its folder is the slot, its fields are the
    knobs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: str
    slot: ClassVar[str]
    """Place in a config: `recompute`, `sharding.states`, …; of a file of the catalogue its folder."""
    plan_types: ClassVar[tuple[type[Plan], ...]] = ()
    """Types of the plans that `plan` returns: several for several forms, none if it plans nothing."""
    title: ClassVar[str]
    clause: ClassVar[str] = ""
    """The sentence, if it is the same with all knobs."""
    source: ClassVar[str]
    """Paper or project it comes from; for memtune's own techniques, the work they build on."""
    paper: ClassVar[str] = ""
    """Its short name in the literature, printed after the sentence; empty if PyTorch itself does it."""
    exactness: ClassVar[Exactness]
    by_budget: ClassVar[bool] = False
    """Its plan frees only as much as the memory requires: a step that needs less needs less of it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Read the slot from the folder of the technique's file."""
        super().__init_subclass__(**kwargs)
        package, _, folder = cls.__module__.rpartition(".")[0].partition(f"{_CATALOGUE}.")
        if folder and not package and "slot" not in vars(cls):
            # Helpers of a slot lie in folders that begin with an underscore.
            cls.slot = folder.partition("._")[0]

    def sentence(self) -> str:
        """Return the setting as one plain clause without a subject: `recomputes every block in backward`."""
        if not self.clause:
            raise TypeError(f"{type(self).__name__} must say in one clause what it does")
        return self.clause

    def described(self) -> str:
        """Return the sentence, with the paper, and the changed knobs that the sentence does not depend on."""
        plain, knobs = self.sentence(), []
        for name, field_info in type(self).model_fields.items():
            value, default = getattr(self, name), field_info.default
            if value != default and self.model_copy(update={name: default}).sentence() == plain:
                knobs.append(f"{name}: {value}")
        brackets = [each for each in (self.paper, *knobs) if each]
        return f"{plain} ({', '.join(brackets)})" if brackets else plain

    @property
    def effects(self) -> Effects:
        """Effects on a step that other axes must know, with these knobs."""
        return NO_EFFECTS

    @property
    def needs(self) -> tuple[Capability, ...]:
        """Capabilities of the device without which it has no effect, with these knobs."""
        return ()

    def ranks_of_a_copy(self, ranks: int) -> int:
        """Return how many consecutive ranks of `ranks` hold one copy of the model together, each a part of
        it.
        """
        return 1

    def exactly(self) -> Exactness:
        """Return the class of exactness with these knobs; `exactness` is that of the default knobs."""
        return self.exactness

    def refuses(self, facts: Facts) -> Reason | None:
        """Return a reason why it may not be used with `facts`, in addition to the rules on effects, or None;
        for `fits` and `apply`.
        """
        return None

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Return a reason why it may not be used on `program` with `target`, which holds the other axes'
        choices, or None.
        """
        return None

    def plan(self, program: Program, target: Target) -> Plan:
        """Return its decisions for `program`; solved once, in the search."""
        return NO_PLAN

    @classmethod
    def plan_from(cls, document: Mapping[str, Any]) -> Plan:
        """Return the plan held by `document`, plain data of a config: of the plan type that shares most keys
        with it.

        Raises:
            ValidationError: A field is missing, unknown or malformed.
        """
        types = cls.plan_types or (Plan,)
        best = max(types, key=lambda each: len(each.model_fields.keys() & document.keys()))
        return best.model_validate_json(json.dumps(document))

    def plan_in(self, plans: Mapping[str, Plan]) -> Plan:
        """Return the plan of this technique's slot in `plans`, or its empty plan if there is none.

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
                evidence=f"plan: {{{self.slot}: …}} would hold {missing}.",
                fix=(
                    "memtune plan model.py --config CONFIG --out tuned.yaml  writes the config with one; or"
                    f" choose {self.slot}: {{kind: none}}"
                ),
                code="MT316",
            ) from error

    def rewrite(self, program: Program, plan: Any, target: Target) -> Program:
        """Return `program` as it is under this technique; a pass."""
        return program

    def passes(self) -> Mapping[PassStage, Rewrite]:
        """Return the passes by stage; `search_spaces._pass_pipeline` runs them stage by stage."""
        return {PassStage.AXES: self.rewrite}

    def env(self) -> dict[str, str]:
        """Return environment variables that must be set before the device starts."""
        return {}

    def partitioning(self) -> dict[str, Any]:
        """Return settings of AOTAutograd's partitioner while graphs are made; the program is recorded from
        these graphs.
        """
        return {}

    def computes_in(self) -> ComputePrecision | None:
        """Return the types in which the model computes, from which the program is recorded; None: its own."""
        return None

    def apply(self, context: Context, plan: Any) -> None:
        """Put it into effect on the live model of `context`, through a mechanism of the runtime."""

    def explain(self, plan: Any) -> tuple[str, ...]:
        """Return lines that describe the decisions of `plan` to the user; none for an empty plan."""
        return ()

    def unmet(self, plan: Any) -> tuple[str, ...]:
        """Return lines on what the settings ask for and `plan` does not do, with the reason; usually none."""
        return ()

    def record(self, target: Target) -> dict[str, Any]:
        """Return the mechanism settings that it expands to; techniques with equal records are one
        candidate.
        """
        raise TypeError(f"{type(self).__name__} must return its mechanism settings")

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Return values worth trying for each knob, the default first; the search may add others that `fits`
        allows.
        """
        return {}

    def choices_on(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """Return `choices`, where they depend on the ranks and nodes of `target`."""
        return self.choices()

    def is_tried(self) -> bool:
        """Return False if a search skips these values of `choices` because another technique does the
        same.
        """
        return True

    def divides_parameters(self, ranks: int, plan: Any) -> bool:
        """Return True if `apply` shards the parameters over some of `ranks`, and can do so before they have
        values.
        """
        return False

    def knobs(self) -> Iterator[tuple[str, Any]]:
        """Yield name and value of every field except `kind`."""
        for name in type(self).model_fields:
            if name != "kind":
                yield name, getattr(self, name)


class NullTechnique(Technique):
    """Base of the techniques that leave their slot as PyTorch has it."""

    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def record(self, target: Target) -> dict[str, Any]:
        """Return no settings: no mechanism is used."""
        return {}
