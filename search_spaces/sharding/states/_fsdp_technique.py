"""Base class of techniques that run on FSDP2: model state sharded and all-gathered unit by unit."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch.distributed.fsdp import MixedPrecisionPolicy

from memtune import refusals
from memtune.effects import Effects
from memtune.parallel.sharding import Sharding, shard, shard_states
from memtune.program import Phase, Program, Step, is_differentiated_again
from memtune.runtime import Context
from memtune.search_spaces import active
from memtune.technique import ComputePrecision, Exactness, Facts, Plan, Reason, Target, Technique

_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class GroupPlan(Plan):
    """Number of ranks in a group, if the config gives none."""

    group: Annotated[int, Field(ge=1)] | None = None
    """Ranks of a group; none if the knob has it."""


class _FsdpUnits(Technique):
    """Shards parameters, gradients and optimizer state over `_degree` ranks each, and gathers them unit by
    unit.

    A unit is one or more blocks; parameters in no block form the root unit, gathered once per micro-batch.
    """

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

    param_dtype: Literal["bfloat16", "float16"] | None = None
    """Type in which units are gathered and compute, over shards of float32. Default: their own; bfloat16
    halves gathered bytes and activations and uses 16-bit matrix products. Lossy.
    """
    reduce_dtype: Literal["bfloat16", "float32"] | None = None
    """Type in which gradients are sent and summed. Default: that in which they are computed; bfloat16 halves
    the bytes of float32 ones, float32 keeps the bits of sums of narrower ones.
    """
    output_dtype: Literal["bfloat16", "float32"] | None = None
    """Type to which the model's outputs are cast. Default: as they are."""
    cast_forward_inputs: bool = True
    """Cast floating-point inputs of each unit to `param_dtype`."""

    def exactly(self) -> Exactness:
        lossy = self.param_dtype is not None or "bfloat16" in (self.reduce_dtype, self.output_dtype)
        return Exactness.LOSSY if lossy else self.exactness

    def computes_in(self) -> ComputePrecision | None:
        if self.param_dtype is None:
            return None
        return ComputePrecision(self.param_dtype, self.output_dtype, self.cast_forward_inputs)

    def _policy(self) -> MixedPrecisionPolicy:
        param, reduce, output = (
            _TYPES[each] if each else None
            for each in (self.param_dtype, self.reduce_dtype, self.output_dtype)
        )
        return MixedPrecisionPolicy(param, reduce, output, self.cast_forward_inputs)

    def _no_such_type(self, program: Program) -> Reason | None:
        """Return why the given types do not apply to the parameters of `program`."""
        sizes = {p.itemsize for p in program.step.parameters if p.trainable}
        if self.param_dtype is None:
            given = [name for name in ("output_dtype",) if getattr(self, name) is not None]
            given += [] if self.cast_forward_inputs else ["cast_forward_inputs"]
            if given:
                return Reason(f"{given[0]} needs units that compute in another type", "param_dtype: bfloat16")
        elif sizes - {4}:
            return Reason("not all trained parameters are float32", "leave param_dtype out")
        if self.reduce_dtype is None:
            return None
        computed = 2 if self.param_dtype else max(sizes, default=0)
        wanted = _TYPES[self.reduce_dtype].itemsize
        if sizes == {wanted} and computed == wanted:
            return Reason(f"gradients already have elements of {wanted} bytes", "leave reduce_dtype out")
        if max(sizes, default=0) > _TYPES["float32"].itemsize:
            return Reason("gradients of more than float32 are reduced as they are", "leave reduce_dtype out")
        return None

    def _degree(self, ranks: int, plan: Any) -> int:
        """Return the number of ranks that share one copy of the model state."""
        return ranks

    def _averages_once(self) -> bool:
        """Return whether gradients are averaged between the copies once a step, not in every micro-batch."""
        return False

    def divides_parameters(self, ranks: int, plan: Any) -> bool:
        return self._degree(ranks, plan) > 1

    def refuses(self, facts: Facts) -> Reason | None:
        if facts.compiled == "model":
            return Reason(
                "one graph holds all blocks, whose parameters are unsharded one by one",
                "execution: {compile: blocks}",
            )
        return None

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require two ranks, and units that FSDP2 can flatten and gather together."""
        if target.ranks < 2:
            return refusals.one_rank(" to shard over")
        if (reason := self.refuses(Facts.of(program, target))) is not None:
            return reason
        if is_differentiated_again(program.step):
            return refusals.differentiated_again(
                "a unit's weights are freed before the second backward reads them"
            )
        return (
            self._no_such_type(program)
            or self._units_do_not_fit(program.step)
            or _used_outside_unit(program.step, self.blocks_per_unit)
        )

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
        if self.blocks_per_unit > 1 and not _runs_as_one(step, self.blocks_per_unit):
            return Reason(
                "some blocks of a unit run more often than others, in turns, or alone without gradients, and"
                " a unit is freed once all its blocks have run",
                "blocks_per_unit: 1",
            )
        scalar = next((p.name for p in step.parameters if not p.shape), None)
        if scalar is not None:
            return refusals.no_dimension(scalar)
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
            param_itemsize=itemsize(self.param_dtype),
            reduce_itemsize=itemsize(self.reduce_dtype),
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
            precision=self._policy(),
            **self._shard_options(),
        )

    def _shard_options(self) -> dict[str, Any]:
        """Return further arguments of `parallel.sharding.fsdp_sharding.shard`."""
        return {}

    def _settings(self, degree: int, ranks: int) -> dict[str, Any]:
        """Return the ranks that shard each state, the gathers, and the frequency of averages."""
        factors = {"parameters": degree, "gradients": degree, "optimizer": degree}
        gather = {"again_in_backward": self.reshard_after_forward, "blocks_per_unit": self.blocks_per_unit}
        often = (
            {"states.average": "step" if self._averages_once() else "micro_batch"} if degree < ranks else {}
        )
        return {"states.shard": factors, "states.gather": gather, **often, **self._types()}

    def _types(self) -> dict[str, Any]:
        """Return the record of the types that differ from those of the shards."""
        reduce = {"states.reduce": self.reduce_dtype} if self.reduce_dtype else {}
        precision = self.computes_in()
        return reduce if precision is None else reduce | {"states.compute": asdict(precision)}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {
            "reshard_after_forward": (True, False),
            "blocks_per_unit": (1, 2),
            "param_dtype": (None, "bfloat16"),
        }


def itemsize(dtype: str | None) -> int | None:
    """Return bytes per element of a type by its name, None for none."""
    return _TYPES[dtype].itemsize if dtype else None


def in_stages(target: Target) -> bool:
    """Return whether a rank runs stages of a pipeline: forwards of other micro-batches precede a backward."""
    parallel = active(target, "sharding.parallel")
    return parallel is not None and parallel.effects.layers == "stages"


@functools.lru_cache(maxsize=8)
def _runs_as_one(step: Step, blocks_per_unit: int) -> bool:
    """Return whether between two calls of a block all others of its unit run once, and gradients as there."""
    block = step.calls.block
    for first in range(0, len(step.blocks), blocks_per_unit):
        members = np.arange(first, min(first + blocks_per_unit, len(step.blocks)))
        rows = np.flatnonzero(np.isin(block, members))
        calls = block[rows]
        if len(calls) % len(members):
            return False
        with_grad = step.calls.grad_enabled[rows].reshape(-1, len(members)) > 0
        if (with_grad != with_grad[:, :1]).any():  # backward would find the unit resharded
            return False
        if (np.sort(calls.reshape(-1, len(members)), axis=1) != members).any():
            return False
    return True


def _mixed_unit(step: Step, blocks_per_unit: int) -> str | None:
    """Return a trainable parameter whose item size differs from others' in its unit, or None."""
    sizes: dict[int, int] = {}
    for parameter in step.parameters:
        unit = parameter.block // blocks_per_unit if parameter.block >= 0 else -1
        if parameter.trainable and sizes.setdefault(unit, parameter.itemsize) != parameter.itemsize:
            return parameter.name
    return None


@functools.lru_cache(maxsize=8)
def _used_outside_unit(step: Step, blocks_per_unit: int) -> Reason | None:
    """Return why a block's parameter cannot be sharded: outside its unit it would be used as a shard."""
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
