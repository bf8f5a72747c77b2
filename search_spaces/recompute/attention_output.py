"""Recompute every block but its attention, whose output and log-sum-exp are kept: attention runs once
(LoongTrain).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.activations.recompute import recompute_blocks
from memtune.effects import DISPATCH_MODE, Effects
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.recompute._block_planner import is_attention, no_attention, no_blocks, why_not
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique


class AttentionOutput(Technique):
    """Trades one hidden state and one log-sum-exp per block for attention's second forward, which `full`
    would run.

    Worth it where sequences are long: attention is then most of a block's forward.

    Distinguishing test: attention's forward runs once per block and step, all other ops of the block up to
    the last tensor saved twice; a block holds its input, attention's output and its log-sum-exp, to the byte.
    """

    kind: Literal["attention_output"] = "attention_output"
    slot: ClassVar[str] = "recompute"
    title: ClassVar[str] = "Recompute every block, run attention once"
    source: ClassVar[str] = "Gu et al. 2024, LoongTrain, arXiv:2406.18485, Selective Checkpoint++"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="uniform", eager_only=DISPATCH_MODE)

    def refuses(self, facts: Facts) -> Reason | None:
        """Needs blocks."""
        return no_blocks(facts)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks with fused attention that do not change their input, in eager mode."""
        return why_not(program.step, target.compiled, is_attention) or no_attention(program.step)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Every block runs again in backward, but for its attention."""
        return program.with_step(
            recompute_blocks(program.step, list(range(len(program.step.blocks))), is_attention)
        )

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim every block in the activation table, with attention's outputs to keep."""
        for region in context.activations.regions:
            context.activations.claim_recompute(region.index, is_attention)

    def record(self, target: Target) -> dict[str, Any]:
        """All blocks; attention kept inside them."""
        return {"activations.recompute": {"every": 1, "keep": "attention"}}
