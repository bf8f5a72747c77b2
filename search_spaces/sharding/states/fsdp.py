"""Parameters, gradients and optimizer state divided over the ranks, gathered block by block (PyTorch FSDP2, ZeRO-3)."""

from __future__ import annotations

import functools
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune.passes.shard import Sharding, shard_states
from memtune.program import Phase, Program, Step
from memtune.runtime.context import Context
from memtune.runtime.sharding import shard
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class Fsdp(Technique):
    """Trades an all-gather of every unit in forward and in backward and a reduce-scatter for 1/degree of the model state.

    A unit is one or more blocks; what is in no block is the root unit, gathered once per micro-batch. With a degree below
    the number of ranks each group of `degree` ranks holds one copy, and gradients are all-reduced between the copies.

    Reordered: the gradient of the union batch is the mean over N ranks of the means over their samples. Each rank rounds
    its own sum and the ring adds N of them, so an element differs from the plain one by at most (N + 1)·eps·Σ|gᵣ|/N
    beside the rounding of the per-sample sums themselves, which both have. Weights are gathered, so forward is bitwise.

    Distinguishing test: a rank holds 1/degree of parameters, gradients and state (rounded up along the first dim), and
    per micro-batch every unit crosses the link once per gather and once per reduction.
    """

    kind: Literal["fsdp"] = "fsdp"
    slot: ClassVar[str] = "sharding.states"
    title: ClassVar[str] = "Model state sharded over ranks"
    source: ClassVar[str] = "Zhao et al. 2023, PyTorch FSDP, arXiv:2304.11277; Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054"
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    degree: Annotated[int, Field(ge=2)] | None = None
    """Ranks that share one copy of the model state, all of them by default; fewer hold more bytes and gather on shorter rings."""
    reshard_after_forward: bool = True
    """Free a unit's parameters between its forward and its backward; off, they stay and the second gather is saved."""
    blocks_per_unit: Annotated[int, Field(ge=1)] = 1
    """Blocks gathered together; larger units mean fewer, larger messages and more bytes whole at once."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs two ranks, a degree that divides them, and units that FSDP2 can flatten and gather in one place."""
        return (
            self._ranks_do_not_fit(target)
            or self._units_do_not_fit(program.step)
            or _no_unit_of_their_own(program.step, self.blocks_per_unit)
        )

    def _ranks_do_not_fit(self, target: Target) -> Reason | None:
        if target.ranks < 2:
            return Reason("there is only one rank to shard over", "--gpus or --workers 2 and more")
        if self.degree is not None and target.ranks % self.degree:
            near = [d for d in range(2, target.ranks + 1) if target.ranks % d == 0]
            return Reason(
                f"degree={self.degree} must divide the {target.ranks} ranks", f"degree: {' or '.join(map(str, near[:4]))}"
            )
        return None

    def _units_do_not_fit(self, step: Step) -> Reason | None:
        blocks = len(step.blocks)
        if self.blocks_per_unit > max(blocks, 1):
            return Reason(f"blocks_per_unit={self.blocks_per_unit}, but there are {blocks} blocks", f"at most {max(blocks, 1)}")
        if not blocks and not self.reshard_after_forward:
            return Reason("without blocks there is one unit, which always stays gathered", "reshard_after_forward: true")
        scalar = next((p.name for p in step.parameters if not p.shape), None)
        if scalar is not None:
            return Reason(f"{scalar} has no dimension to divide", "give it the shape (1,)")
        mixed = _mixed_unit(step, self.blocks_per_unit)
        if mixed is not None:
            return Reason(f"{mixed} would be gathered with parameters of another type", "one dtype for all trainable parameters")
        return None

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Gathers, copies, reductions and the buffers they need; state at the size of a shard."""
        degree = self.degree or program.ranks
        how = Sharding(
            degree=degree,
            replicas=program.ranks // degree,
            reshard_after_forward=self.reshard_after_forward,
            blocks_per_unit=self.blocks_per_unit,
            replicas_across_nodes=program.ranks > target.hardware.gpus_per_node,
            stages_messages=target.device == "cpu",
        )
        return program.with_step(shard_states(program.step, how))

    def apply(self, context: Context, plan: Plan) -> None:
        """Shard the model with FSDP2 and rebind the optimizer to the shards."""
        shard(
            context,
            degree=self.degree or context.ranks,
            reshard_after_forward=self.reshard_after_forward,
            blocks_per_unit=self.blocks_per_unit,
        )

    def record(self, target: Target) -> dict[str, Any]:
        """Ranks over which each state is divided, and what is gathered when."""
        degree = self.degree or target.ranks
        factors = {"parameters": degree, "gradients": degree, "optimizer": degree}
        gather = {"again_in_backward": self.reshard_after_forward, "blocks_per_unit": self.blocks_per_unit}
        return {"states.shard": factors, "states.gather": gather}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """All ranks and the sizes of a node or a part of it; `fits` drops those that do not divide the ranks."""
        return {"degree": (None, 2, 4, 8), "reshard_after_forward": (True, False), "blocks_per_unit": (1, 2)}


@functools.lru_cache(maxsize=8)
def _mixed_unit(step: Step, blocks_per_unit: int) -> str | None:
    """A trainable parameter whose item size is not that of the others in its unit, if there is one."""
    sizes: dict[int, int] = {}
    for parameter in step.parameters:
        unit = parameter.block // blocks_per_unit if parameter.block >= 0 else -1
        if parameter.trainable and sizes.setdefault(unit, parameter.itemsize) != parameter.itemsize:
            return parameter.name
    return None


@functools.lru_cache(maxsize=8)
def _no_unit_of_their_own(step: Step, blocks_per_unit: int) -> Reason | None:
    """Why not, where a block's parameter is also used outside its unit: there it would be a shard, or not there at all."""
    owner = np.asarray([p.block for p in step.parameters] + [-1], np.int32)[step.parameter_of[step.use_storage]]
    reader = step.op_block[step.use_op]
    # Ops that no block owns may be a parameter's cast or view made by the block itself; forward ops know where they ran.
    strays = (owner >= 0) & (step.op_phase[step.use_op] == Phase.FORWARD)
    strays &= (reader < 0) | (reader // blocks_per_unit != owner // blocks_per_unit)
    if not strays.any():
        return None
    index = int(step.parameter_of[step.use_storage[strays][0]])
    return Reason(
        f"{step.parameters[index].name} is used outside its unit", "blocks that share no parameter with the rest of the model"
    )
