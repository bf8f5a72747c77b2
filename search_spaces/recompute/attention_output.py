"""Recompute every block except its attention, whose output and log-sum-exp are kept (LoongTrain)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.activations.recompute import recompute_blocks
from memtune.effects import DISPATCH_MODE, Effects
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.recompute._block_planner.fits import (
    cannot_recompute,
    is_attention,
    no_attention,
    no_blocks,
)
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique


class AttentionOutput(Technique):
    """Keeps one hidden state and one log-sum-exp per block and saves the second forward of attention that
    `full` runs.

    Useful for long sequences, where attention is most of a block's forward.
    """

    kind: Literal["attention_output"] = "attention_output"
    title: ClassVar[str] = "Recompute every block, run attention once"
    clause: ClassVar[str] = "recomputes every block in backward except attention, whose output is kept"
    source: ClassVar[str] = "Gu et al. 2024, LoongTrain, arXiv:2406.18485, Selective Checkpoint++"
    paper: ClassVar[str] = "LoongTrain"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="uniform", eager_only=DISPATCH_MODE)

    def refuses(self, facts: Facts) -> Reason | None:
        return no_blocks(facts)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse blocks without fused attention, blocks that change their input, and compiled code."""
        return cannot_recompute(program.step, target.compiled, is_attention) or no_attention(program.step)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Return the program with every block but its attention run again in backward."""
        return program.with_step(
            recompute_blocks(program.step, list(range(len(program.step.blocks))), is_attention)
        )

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim every block in the activation table, keeping attention's outputs."""
        for region in context.activations.regions:
            context.activations.claim_recompute(region.index, is_attention)

    def record(self, target: Target) -> dict[str, Any]:
        return {"activations.recompute": {"every": 1, "keep": "attention"}}
