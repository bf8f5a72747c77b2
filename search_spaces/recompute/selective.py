"""Recompute cheap ops of every block; keep the outputs of matrix products and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from memtune.activations.recompute import Keep, recompute_blocks
from memtune.effects import DISPATCH_MODE, Effects
from memtune.program import OpAddresses, Program
from memtune.runtime import Context
from memtune.search_spaces.recompute._block_planner import (
    CallsPlan,
    calls_by_block,
    cannot_recompute,
    core_attention,
    frees_saved_tensors,
    is_matmul_or_attention,
    missing_plan,
    no_attention,
    no_blocks,
    plan_calls,
)
from memtune.technique import NO_PLAN, Exactness, Facts, Plan, Reason, Target, Technique


class Selective(Technique):
    """Recomputes norms, activation functions and dropout instead of keeping their outputs; outputs of matmuls
    and attention are kept.

    Distinguishing test: no matrix product runs twice, and every matmul and attention output of a block is
    still held.
    """

    kind: Literal["selective"] = "selective"
    slot: ClassVar[str] = "recompute"
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

    def sentence(self) -> str:
        """Return the setting as one clause."""
        if self.scope == "core_attention":
            return "recomputes attention scores and softmax in backward"
        return "recomputes norms, activation functions and dropout in backward"

    def refuses(self, facts: Facts) -> Reason | None:
        """Refuse a model without blocks."""
        return no_blocks(facts)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse blocks that change their input and compiled code; for `core_attention` also fused
        attention.
        """
        if self.scope == "block":
            return cannot_recompute(program.step, target.compiled, is_matmul_or_attention)
        reason = cannot_recompute(program.step, target.compiled)
        if reason is None and not frees_saved_tensors(program.step, core_attention):
            what = "fused already" if no_attention(program.step) is None else "not in the blocks"
            return Reason(
                f"attention's scores are saved nowhere: it is {what}",
                "recompute: {kind: selective, scope: block}",
            )
        return reason

    def plan(self, program: Program, target: Target) -> Plan:
        """Return the calls of each block that are kept or skipped for `core_attention`, else an
        empty plan.
        """
        return NO_PLAN if self.scope == "block" else plan_calls(program.step, core_attention)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Return the program with every block run again except its matmuls and attention, or all but
        attention's core.
        """
        blocks = list(range(len(program.step.blocks)))
        keep = self._calls(plan, len(blocks)) or is_matmul_or_attention
        return program.with_step(recompute_blocks(program.step, blocks, keep))

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim every block in the activation table, with the calls to keep."""
        regions = context.activations.regions
        keeps: Sequence[Keep] = [is_matmul_or_attention] * len(regions)
        for region, keep in zip(regions, self._calls(plan, len(regions)) or keeps, strict=True):
            context.activations.claim_recompute(region.index, keep)

    def _calls(self, plan: Plan, blocks: int) -> list[OpAddresses] | None:
        """Return the planned calls of each block; None with `scope: block`, which plans nothing."""
        if self.scope == "block":
            return None
        if not isinstance(plan, CallsPlan):
            raise missing_plan("the config has none")
        return calls_by_block(plan, blocks)

    def record(self, target: Target) -> dict[str, Any]:
        """Return what every block keeps."""
        keep = "matmul_and_attention" if self.scope == "block" else "all but core attention"
        return {"activations.recompute": {"every": 1, "keep": keep}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Return both scopes."""
        return {"scope": ("block", "core_attention")}
