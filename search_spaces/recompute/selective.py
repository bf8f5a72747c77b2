"""Recompute all but the matrix products and attention of every block: cheap ops run again, expensive ones are
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from memtune.activations.recompute import Keep, recompute_blocks
from memtune.effects import DISPATCH_MODE, Effects
from memtune.program import OpAddresses, Program
from memtune.runtime import Context
from memtune.search_spaces.recompute._block_planner import (
    CallsPlan,
    calls_in,
    core_attention,
    frees_something,
    is_matmul_or_attention,
    no_attention,
    no_blocks,
    no_plan,
    plan_calls,
    why_not,
)
from memtune.technique import NO_PLAN, Exactness, Facts, Plan, Reason, Target, Technique


class Selective(Technique):
    """Trades a second run of norms, activations and dropout for their bytes; outputs of matmuls and attention
    stay.

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
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="uniform", eager_only=DISPATCH_MODE)

    scope: Literal["block", "core_attention"] = "block"
    """What may run again: all cheap ops of a block, or only attention's core where it is not fused: the
    scores, softmax, its dropout and the product with the values, whose bytes grow with the square of the
    sequence (Korthikanti's own form).
    """

    def refuses(self, facts: Facts) -> Reason | None:
        """Needs blocks."""
        return no_blocks(facts)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks that do not change their input, in eager mode; for `core_attention`, attention that is
        not fused.
        """
        if self.scope == "block":
            return why_not(program.step, target.compiled, is_matmul_or_attention)
        reason = why_not(program.step, target.compiled)
        if reason is None and not frees_something(program.step, core_attention):
            what = "fused already" if no_attention(program.step) is None else "not in the blocks"
            return Reason(
                f"attention's scores are saved nowhere: it is {what}",
                "recompute: {kind: selective, scope: block}",
            )
        return reason

    def plan(self, program: Program, target: Target) -> Plan:
        """For `core_attention`: which calls of each block are kept, run again, or not needed again."""
        return NO_PLAN if self.scope == "block" else plan_calls(program.step, core_attention)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Every block runs again in backward, but for its matmuls and attention, or for all but attention's
        core.
        """
        blocks = list(range(len(program.step.blocks)))
        keep = self._calls(plan, len(blocks)) or is_matmul_or_attention
        return program.with_step(recompute_blocks(program.step, blocks, keep))

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim every block in the activation table, with what to keep."""
        regions = context.activations.regions
        keeps: Sequence[Keep] = [is_matmul_or_attention] * len(regions)
        for region, keep in zip(regions, self._calls(plan, len(regions)) or keeps, strict=True):
            context.activations.claim_recompute(region.index, keep)

    def _calls(self, plan: Plan, blocks: int) -> list[OpAddresses] | None:
        """Return the planned calls of each block; None with `scope: block`, which plans nothing."""
        if self.scope == "block":
            return None
        if not isinstance(plan, CallsPlan):
            raise no_plan("the config has none")
        return calls_in(plan, blocks)

    def record(self, target: Target) -> dict[str, Any]:
        """All blocks; matmuls and attention, or all but attention's core, kept inside them."""
        keep = "matmul_and_attention" if self.scope == "block" else "all but core attention"
        return {"activations.recompute": {"every": 1, "keep": keep}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Both scopes."""
        return {"scope": ("block", "core_attention")}
