"""Recompute cheap ops of every block; keep the outputs of matrix products and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune import refusals
from memtune.activations.recompute import Keep, recompute_blocks
from memtune.effects import DISPATCH_MODE, Effects
from memtune.program import OpAddresses, Program, Step
from memtune.runtime import Context
from memtune.search_spaces import did_you_mean
from memtune.search_spaces.recompute._block_planner.call_selection import (
    Block,
    CallsPlan,
    calls_by_block,
    core_attention,
    frees_saved_tensors,
    plan_calls,
)
from memtune.search_spaces.recompute._block_planner.fits import (
    FREES_NOTHING,
    MATMULS,
    cannot_recompute,
    is_attention,
    is_matmul_or_attention,
    no_attention,
    no_blocks,
)
from memtune.technique import NO_PLAN, Exactness, Facts, Plan, Reason, Target, Technique


class Selective(Technique):
    """Recomputes norms, activation functions and dropout instead of keeping their outputs; outputs of matmuls
    and attention are kept.
    """

    kind: Literal["selective"] = "selective"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (Plan, CallsPlan)
    title: ClassVar[str] = "Recompute cheap ops, keep matmuls and attention"
    source: ClassVar[str] = (
        "Korthikanti et al. 2023, Reducing Activation Recomputation in Large Transformer Models, section 5,"
        " and its per-op form in PyTorch's selective checkpointing"
    )
    paper: ClassVar[str] = "Korthikanti et al. 2023"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="uniform", eager_only=DISPATCH_MODE)

    scope: Literal["block", "core_attention"] = "block"
    """Ops that may run again: all cheap ops of a block, or only the core of unfused attention: scores,
    softmax, its dropout and the product with the values, whose bytes grow with the square of the sequence
    (Korthikanti's own form).
    """

    matmuls: Literal["all", "every_second"] = "all"
    """Matrix products of a block whose outputs are kept: all, or the first, third and so on, as torchtitan's
    per-op option has it: half of the kept bytes for half of the products' time.
    """
    save_ops: tuple[Annotated[str, Field(pattern=r"^\w+\.\w+(\.\w+)?$")], ...] = ()
    """Ops whose outputs are kept instead of matrix products and attention: `aten.mm`, with an overload
    `aten.mm.default`. Empty for those.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        if self.scope == "core_attention":
            return "recomputes attention scores and softmax in backward"
        if self.save_ops:
            return (
                f"keeps the outputs of {', '.join(self.save_ops)}, recomputes the rest of a block in backward"
            )
        if self.matmuls == "every_second":
            return "recomputes every second product, norms, activation functions and dropout in backward"
        return "recomputes norms, activation functions and dropout in backward"

    def refuses(self, facts: Facts) -> Reason | None:
        return no_blocks(facts)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse blocks that change their input and compiled code; with `core_attention` fused attention."""
        if sum((self.scope != "block", self.matmuls != "all", bool(self.save_ops))) > 1:
            return Reason(
                "scope, matmuls and save_ops are three ways to choose what is kept", "give one of them"
            )
        if self._by_name:
            return cannot_recompute(program.step, target.compiled, is_matmul_or_attention)
        reason = cannot_recompute(program.step, target.compiled)
        if reason is None and self.scope == "block":
            frees = frees_saved_tensors(program.step, self._again)
            return self._no_such_op(program.step) or (None if frees else FREES_NOTHING)
        if reason is None and not frees_saved_tensors(program.step, core_attention):
            what = "fused already" if no_attention(program.step) is None else "not in the blocks"
            return Reason(
                f"attention's scores are saved nowhere: it is {what}",
                "recompute: {kind: selective, scope: block}",
            )
        return reason

    @property
    def _by_name(self) -> bool:
        """Return whether an op's name alone decides whether it is kept, so that nothing is planned."""
        return self.scope == "block" and self.matmuls == "all" and not self.save_ops

    def _no_such_op(self, step: Step) -> Reason | None:
        """Return why `save_ops` keeps nothing: an entry is no op of the blocks."""
        inside = {step.names[i] for i in np.unique(step.ops.name[step.ops.block >= 0])}
        for wanted in self.save_ops:
            if not any(_is_op(name, wanted) for name in inside):
                near = did_you_mean(wanted, sorted(name.rpartition(".")[0] for name in inside))
                return Reason(f"{wanted} is no op of the blocks.{near}", "save_ops: [aten.mm]")
        return None

    def _again(self, block: Block) -> set[int]:
        """Return the ops of a block that run again."""
        if self.scope == "core_attention":
            return core_attention(block)
        if self.save_ops:
            return {op for op in block.ops if not any(_is_op(block.name[op], each) for each in self.save_ops)}
        products = [op for op in block.ops if block.name[op] in MATMULS]
        kept = {*products[::2], *(op for op in block.ops if is_attention(block.name[op]))}
        return set(block.ops) - kept

    def plan(self, program: Program, target: Target) -> Plan:
        return NO_PLAN if self._by_name else plan_calls(program.step, self._again)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Return the program with blocks run again except matmuls and attention, or all but its core."""
        blocks = list(range(len(program.step.blocks)))
        keep = self._calls(plan, len(blocks)) or is_matmul_or_attention
        return program.with_step(recompute_blocks(program.step, blocks, keep))

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim every block in the activation table, with the calls to keep."""
        n_blocks = len(context.all_blocks)
        keeps: Sequence[Keep] = self._calls(plan, n_blocks) or [is_matmul_or_attention] * n_blocks
        for region, keep in zip(context.activations.regions, context.of_own_blocks(keeps), strict=True):
            context.activations.claim_recompute(region.index, keep)

    def _calls(self, plan: Plan, blocks: int) -> list[OpAddresses] | None:
        """Return the planned calls of each block; None if nothing is planned."""
        if self._by_name:
            return None
        if not isinstance(plan, CallsPlan):
            raise refusals.plan_of_other_model("recompute: {kind: selective}", "The config has none.")
        return calls_by_block(plan, blocks)

    def record(self, target: Target) -> dict[str, Any]:
        keep = "matmul_and_attention" if self.scope == "block" else "all but core attention"
        keep = "every second matmul and attention" if self.matmuls == "every_second" else keep
        keep = ", ".join(sorted(self.save_ops)) or keep
        return {"activations.recompute": {"every": 1, "keep": keep}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"scope": ("block", "core_attention"), "matmuls": ("all", "every_second")}


def _is_op(name: str, wanted: str) -> bool:
    """Return whether an op `aten.mm.default` is `wanted`, which may lack the overload."""
    return name == wanted or name.rpartition(".")[0] == wanted
