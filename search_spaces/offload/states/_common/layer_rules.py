"""Rules of techniques that offload the blocks' parameters (`offload.parameters.offloader`), and the knob of
those that run the native update.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune import refusals
from memtune.offload.optimizer import unknown_optimizer
from memtune.offload.parameters import not_in_layers
from memtune.program import Kind, Program, Step, columns_of, gathers_of
from memtune.search_spaces._support import Config, conflict
from memtune.technique import Exactness, Reason, Target, Technique

EAGER_ONLY = "compiled graphs keep offloaded parameters in device memory"
_OTHER = "offload: {states: {kind: optimizer_cpu}}"
_BY_DEFAULT = (
    ("reshard_after_forward", True),
    ("blocks_per_unit", 1),
    ("prefetch", None),
    ("param_dtype", None),
    ("reduce_dtype", None),
)


def cannot_run(
    program: Program, target: Target, *, natively: bool = True, alone: bool = True
) -> Reason | None:
    """Return why blocks' parameters cannot be offloaded in `program`, on one rank.

    `natively`: the native update runs, not the user's own optimizer.
    """
    step = program.step
    if alone and (program.ranks > 1 or target.ranks > 1):
        return Reason("offload of blocks' parameters is for one rank", "sharding: {states: {kind: fsdp}}")
    return _cannot_offload_parameters(step, target, natively)


def cannot_run_on_ranks(
    technique: Technique, program: Program, target: Target, *, natively: bool = True
) -> Reason | None:
    """Return the same for `technique` on one rank, on replicas, or on ranks that all-gather each block."""
    if target.ranks > 1:
        if (reason := conflict(technique, target, "sharding.parallel", "sharding.states")) is not None:
            return reason
        states = target.chosen["sharding.states"]
        if states.effects.shards == "parameters":
            if (reason := _not_gathered(technique, program, target)) is not None:
                return reason
    return _cannot_offload_parameters(program.step, target, natively)


def other_gathers(config: Config) -> Reason | None:
    """Return why parameters of blocks cannot be offloaded with these settings of FSDP2; for `refuses`."""
    states = config.chosen.get("sharding.states") if config.ranks > 1 else None
    if states is None or states.effects.shards != "parameters":
        return None
    for name, value in _BY_DEFAULT:
        if getattr(states, name, value) is not value:
            return Reason(
                f"sharded blocks are offloaded with FSDP2's default gathers, not with {name}", f"no {name}"
            )
    if getattr(states, "degree", None) not in (None, config.ranks):
        return Reason("sharded blocks are offloaded only if all ranks share a copy", "no degree")
    return None


def _not_gathered(technique: Technique, program: Program, target: Target) -> Reason | None:
    """Return why FSDP2 does not all-gather each block once per pass, among all ranks."""
    if (reason := other_gathers(target)) is not None:
        return reason
    if (reason := conflict(technique, target, "sharding.communication")) is not None:
        return reason
    if gathers_of(program.step) is None:
        return Reason("a block is not gathered once for each pass", "sharding: {states: {kind: ddp}}")
    return None


def _cannot_offload_parameters(step: Step, target: Target, natively: bool) -> Reason | None:
    if target.compiled:
        return Reason(EAGER_ONLY, "execution.compile: false")
    if (reason := not_in_layers(step)) != "":
        return Reason(reason, _OTHER)
    columns = columns_of(step.parameters)
    trained = columns.gradient >= 0
    in_blocks = columns.block[trained] >= 0
    if not in_blocks.any() or not (step.storages.kind == Kind.OPTIMIZER).any():
        return Reason("the optimizer has no state of a block to offload")
    if natively and (unknown := unknown_optimizer(target)) is not None:
        return unknown
    if natively and (columns.itemsize[trained] != 4).any():
        return refusals.float32_weights("offload: {states: {kind: optimizer_cpu, update: master}}")
    return None


class NativelyUpdated(Technique):
    """Keeps optimizer state off the device, where the native update runs."""

    exactness: ClassVar[Exactness] = Exactness.REORDERED

    update: Literal["native", "master"] = "native"
    """`native` is for float32 parameters and has the bits of torch's fused AdamW; `master` keeps float32
    masters for bfloat16 parameters, on the tier of the state as well.
    """

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"update": ("native", "master")}

    def exactly(self) -> Exactness:
        # With masters it trains as bfloat16 with float32 masters, not as the user's optimizer.
        return Exactness.LOSSY if self.update == "master" else self.exactness
