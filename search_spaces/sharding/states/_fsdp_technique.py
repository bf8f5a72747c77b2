"""Base class of techniques that run on FSDP2: model state sharded and all-gathered unit by unit."""

from __future__ import annotations

import functools
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from memtune.effects import Effects
from memtune.parallel.sharding import Sharding, shard, shard_states
from memtune.program import Phase, Program, Step
from memtune.runtime import Context
from memtune.search_spaces import active
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique


class GroupPlan(Plan):
    """Number of ranks in a group, if the config gives none."""

    group: Annotated[int, Field(ge=1)] | None = None
    """Ranks of a group; none if the knob has it."""


class _FsdpUnits(Technique):
    """Shards parameters, gradients and optimizer state over `_degree` ranks each, and gathers them unit by
    unit.

    A unit is one or more blocks; parameters in no block form the root unit, gathered once per micro-batch.
    """

    slot: ClassVar[str] = "sharding.states"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(
        among_copies=True, shards="parameters", reduces="ready", every_micro_batch=True
    )

    reshard_after_forward: bool = True
    """Free a unit's parameters between its forward and its backward; off, they are resident and the second
    gather is saved.
    """
    blocks_per_unit: Annotated[int, Field(ge=1)] = 1
    """Blocks gathered together; larger units mean fewer, larger messages and more unsharded bytes at once."""

    def _degree(self, ranks: int, plan: Any) -> int:
        """Return the number of ranks that share one copy of the model state."""
        return ranks

    def _averages_once(self) -> bool:
        """Return whether gradients are averaged between the copies once a step, not in every micro-batch."""
        return False

    def divides_parameters(self, ranks: int, plan: Any) -> bool:
        """Return whether more than one rank shares a copy; all parameters are sharded then."""
        return self._degree(ranks, plan) > 1

    def refuses(self, facts: Facts) -> Reason | None:
        """Refuse one compiled graph of the whole model."""
        if facts.compiled == "model":
            return Reason(
                "one graph holds all blocks, whose parameters are unsharded one by one",
                "execution: {compile: blocks}",
            )
        return None

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require two ranks, and units that FSDP2 can flatten and gather together."""
        if target.ranks < 2:
            return Reason("there is only one rank to shard over", "--gpus or --workers 2 and more")
        if (reason := self.refuses(Facts.of(program, target))) is not None:
            return reason
        return self._units_do_not_fit(program.step) or _used_outside_unit(program.step, self.blocks_per_unit)

    def _units_do_not_fit(self, step: Step) -> Reason | None:
        blocks = len(step.blocks)
        if self.blocks_per_unit > max(blocks, 1):
            return Reason(
                f"blocks_per_unit={self.blocks_per_unit}, but there are {blocks} blocks",
                f"at most {max(blocks, 1)}",
            )
        if not blocks and not self.reshard_after_forward:
            return Reason(
                "without blocks there is one unit, which always stays gathered", "reshard_after_forward: true"
            )
        scalar = next((p.name for p in step.parameters if not p.shape), None)
        if scalar is not None:
            return Reason(f"{scalar} has no dimension to divide", "give it the shape (1,)")
        mixed = _mixed_unit(step, self.blocks_per_unit)
        if mixed is not None:
            return Reason(
                f"{mixed} would be gathered with parameters of another type",
                "one dtype for all trainable parameters",
            )
        return None

    def rewrite(self, program: Program, plan: Any, target: Target) -> Program:
        """Add gathers, copies, reductions and their buffers, and shrink the state to a shard."""
        return program.with_step(shard_states(program.step, self._sharding(program, plan, target)))

    def _sharding(self, program: Program, plan: Any, target: Target) -> Sharding:
        degree = self._degree(program.ranks, plan)
        return Sharding(
            degree=degree,
            replicas=program.ranks // degree,
            reshard_after_forward=self.reshard_after_forward,
            blocks_per_unit=self.blocks_per_unit,
            replicas_across_nodes=program.ranks > target.hardware.local_ranks(program.ranks),
            stages_messages=target.device == "cpu",
            two_hop=self._averages_once(),
            keeps_root=not in_stages(target),
        )

    def apply(self, context: Context, plan: Any) -> None:
        """Shard the model with FSDP2 and rebind the optimizer to the shards."""
        shard(
            context,
            degree=self._degree(context.placement.data_parallel_size, plan),
            reshard_after_forward=self.reshard_after_forward,
            blocks_per_unit=self.blocks_per_unit,
            two_hop=self._averages_once(),
            kind=self.kind,
            **self._more(),
        )

    def _more(self) -> dict[str, Any]:
        """Return further arguments of `parallel.sharding.fsdp_sharding.shard`."""
        return {}

    def _settings(self, degree: int, ranks: int) -> dict[str, Any]:
        """Return the number of ranks that shard each state, the gathers, and the frequency of averages
        between copies.
        """
        factors = {"parameters": degree, "gradients": degree, "optimizer": degree}
        gather = {"again_in_backward": self.reshard_after_forward, "blocks_per_unit": self.blocks_per_unit}
        often = (
            {"states.average": "step" if self._averages_once() else "micro_batch"} if degree < ranks else {}
        )
        return {"states.shard": factors, "states.gather": gather, **often}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Return both values of reshard, and units of one and two blocks."""
        return {"reshard_after_forward": (True, False), "blocks_per_unit": (1, 2)}


def in_stages(target: Target) -> bool:
    """Return whether a rank runs stages of a pipeline: other micro-batches' forwards run before a
    micro-batch's backward.
    """
    parallel = active(target, "sharding.parallel")
    return parallel is not None and parallel.effects.layers == "stages"


def does_not_divide(name: str, value: int, ranks: int) -> Reason | None:
    """Return why `ranks` cannot be divided into groups of `value`, None if they can."""
    if ranks % value == 0:
        return None
    near = " or ".join(map(str, [d for d in range(2, ranks + 1) if ranks % d == 0][:4]))
    if value > ranks:
        return Reason(f"{name}={value} is more than the {ranks} ranks", f"{name}: {near}")
    return Reason(f"{name}={value} must divide the {ranks} ranks", f"{name}: {near}")


@functools.lru_cache(maxsize=8)
def _mixed_unit(step: Step, blocks_per_unit: int) -> str | None:
    """Return a trainable parameter whose item size differs from that of the others in its unit, if there is
    one.
    """
    sizes: dict[int, int] = {}
    for parameter in step.parameters:
        unit = parameter.block // blocks_per_unit if parameter.block >= 0 else -1
        if parameter.trainable and sizes.setdefault(unit, parameter.itemsize) != parameter.itemsize:
            return parameter.name
    return None


@functools.lru_cache(maxsize=8)
def _used_outside_unit(step: Step, blocks_per_unit: int) -> Reason | None:
    """Return why a block's parameter cannot be sharded: it is also used outside its unit, where it would be a
    shard.
    """
    owner = np.asarray([p.block for p in step.parameters] + [-1], np.int32)[
        step.parameter_of[step.uses.storage]
    ]
    reader = step.ops.block[step.uses.op]
    # Backward ops without a block may be a cast or view of the parameter made by the block itself; only
    # forward ops record where they ran.
    strays = (owner >= 0) & (step.ops.phase[step.uses.op] == Phase.FORWARD)
    strays &= (reader < 0) | (reader // blocks_per_unit != owner // blocks_per_unit)
    if not strays.any():
        return None
    index = int(step.parameter_of[step.uses.storage[strays][0]])
    return Reason(
        f"{step.parameters[index].name} is used outside its unit",
        "blocks that share no parameter with the rest of the model",
    )
