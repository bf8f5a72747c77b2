"""Base class of techniques that shard each state of the model by a factor of its own."""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from memtune import refusals
from memtune.effects import Effects
from memtune.parallel.sharding import Bytes, Division, Factors, Schedule, divide, divide_states
from memtune.program import Kind, Program, Step, Tier, columns_of
from memtune.runtime import Context
from memtune.search_spaces.sharding.states._fsdp_technique import _FsdpUnits, itemsize
from memtune.technique import Reason, Target

BUCKETS_MB = 25, 200


class _NestedSharding(_FsdpUnits):
    """Shards parameters, gradients and optimizer state by `_factors`."""

    effects: ClassVar[Effects] = replace(_FsdpUnits.effects, shards="nested", reduces="step")

    bucket_cap_mb: Annotated[int, Field(ge=1)] = 25
    """MiB per message for gradients and weights outside of FSDP2: gradients reduced further, weights gathered
    after the step.
    """

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # A bucket's message between copies is that of one shard: many nodes need large ones.
        return {**super().choices(), "bucket_cap_mb": BUCKETS_MB}

    @abc.abstractmethod
    def _factors(self, ranks: int, plan: Any) -> Factors: ...

    def divides_parameters(self, ranks: int, plan: Any) -> bool:
        return self._factors(ranks, plan).parameters > 1

    def _why_not(self, factors: Factors, program: Program, target: Target) -> Reason | None:
        """Return why `factors` cannot be used on `program`, or equal another technique."""
        problem = factors.problem(target.ranks)
        if problem:
            return refusals.no_factors(problem)
        p, g, o, several = factors.parameters, factors.gradients, factors.optimizer, program.accumulate > 1
        if not several and g != p:
            return Reason(
                f"with one micro-batch a step there are no sums of gradients: it equals ({p}, {p}, {o})",
                f"gradients: {p}",
            )
        name = _named(factors, target.ranks, several)
        if name:
            return Reason(f"({p}, {g}, {o}) is {name}", f"sharding.states: {{kind: {name}}}")
        scalar = next(
            (each.name for each in program.step.parameters if each.trainable and not each.shape), None
        )
        if scalar is not None:
            return refusals.no_dimension(scalar)
        if p == 1 and (self.param_dtype or self.reduce_dtype):
            return Reason("whole parameters are not gathered, so they compute in their own type", "zero3")
        if g == 1 and (self.param_dtype or self.reduce_dtype):
            return Reason("sums of whole gradients have the parameters' own type", f"gradients: {p}")
        return super().fits(program, target) if p > 1 else None

    def rewrite(self, program: Program, plan: Any, target: Target) -> Program:
        """Add FSDP2's gathers and reductions if parameters are sharded, and the further sharding."""
        division = Division(
            factors=self._factors(program.ranks, plan),
            ranks=program.ranks,
            ranks_per_node=target.hardware.local_ranks(program.ranks),
            micro_batches=program.accumulate,
            bucket_bytes=self.bucket_cap_mb << 20,
            reshard_after_forward=self.reshard_after_forward,
            blocks_per_unit=self.blocks_per_unit,
            stages_messages=target.device == "cpu",
            param_itemsize=itemsize(self.param_dtype),
            reduce_itemsize=itemsize(self.reduce_dtype),
        )
        return program.with_step(divide_states(program.step, division))

    def apply(self, context: Context, plan: Any) -> None:
        """Shard the model's states and rebind the optimizer to this rank's shards."""
        divide(
            context,
            self._factors(context.placement.data_parallel_size, plan),
            kind=self.kind,
            bucket_cap_mb=self.bucket_cap_mb,
            reshard_after_forward=self.reshard_after_forward,
            blocks_per_unit=self.blocks_per_unit,
            precision=self._policy(),
        )

    def _divided_settings(self, factors: dict[str, Any], divides_parameters: bool) -> dict[str, Any]:
        gather = {"again_in_backward": self.reshard_after_forward, "blocks_per_unit": self.blocks_per_unit}
        # The key is not `states.gather`: custom collectives require units whose gradients only FSDP2 reduces.
        gathers = {"states.units": gather} if divides_parameters else {}
        return {
            "states.shard": factors,
            "states.buckets": {"bytes": self.bucket_cap_mb << 20},
            **gathers,
            **self._types(),
        }


def _named(factors: Factors, ranks: int, several: bool) -> str:
    """Return the technique that makes the same division, '' for none."""
    p, g, o = factors.parameters, factors.gradients, factors.optimizer
    if p == g == o:
        in_groups = f"mics, group: {o}" if several else f"fsdp, degree: {o}"
        return "ddp" if o == 1 else "fsdp" if o == ranks else in_groups
    if (p, o) == (1, ranks) and g in (1, ranks):
        return "zero1" if g == 1 else "zero2"
    return ""


def whole_bytes(step: Step) -> Bytes:
    """Return the bytes of the model state of `step` before sharding."""
    columns = columns_of(step.parameters)
    trained = int(columns.n_bytes[columns.trainable].sum())
    mine = (step.storages.tier == Tier.DEVICE) & (step.storages.producer < 0)
    weights, state = (
        int(step.storages.bytes[mine & (step.storages.kind == kind)].sum())
        for kind in (Kind.PARAMETER, Kind.OPTIMIZER)
    )
    return Bytes(weights, trained, state)


def schedule_of(program: Program, target: Target, *, gathers: int) -> Schedule:
    """Return the settings that decide, together with the factors, which bytes are sent."""
    node = target.hardware.local_ranks(target.ranks)
    return Schedule(target.ranks, node, program.accumulate, gathers)
