"""Recompute from one attention to the next: its output and log-sum-exp are kept, q, k and v are rebuilt (DistFlashAttn)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.passes.recompute import recompute_blocks
from memtune.program import Program
from memtune.runtime.context import Context
from memtune.search_spaces.recompute._attention import (
    claim_attention_once,
    record_attention_once,
    why_not_attention_once,
)
from memtune.search_spaces.recompute._keeps import is_attention
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class AttentionBoundary(Technique):
    """Trades one hidden state and one log-sum-exp per block for attention's second forward, which `full` would run.

    DistFlashAttn moves the cuts of checkpointing from the blocks' edges to attention's outputs, so that a region is output
    projection, MLP, norm and the next block's q, k and v. What backward has at hand is the same as under `attention_output`:
    attention's output and log-sum-exp, and the residual stream, without which no region can be rebuilt (x + f(attention) needs
    x). The ops that run again are the same too; only the order in which they are grouped is not. So both are one mechanism and
    one candidate. Per block that is two hidden states and the log-sum-exp against one hidden state under `full`; the published
    count of one leaves the residual stream out.

    Distinguishing test: attention's forward runs once per block and step; a block holds what attention_output's does, to the
    byte.
    """

    kind: Literal["attention_boundary"] = "attention_boundary"
    slot: ClassVar[str] = "recompute"
    title: ClassVar[str] = "Recompute from attention to attention"
    source: ClassVar[str] = "Li et al. 2024, DistFlashAttn, arXiv:2310.03294, rematerialization-aware checkpointing"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    eager_only: ClassVar[str] = "it sees which op runs through a dispatch mode"

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks with fused attention that do not change their input, in eager mode."""
        return why_not_attention_once(program, target)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Every block runs again in backward, but for its attention."""
        return program.with_step(recompute_blocks(program.step, list(range(len(program.step.blocks))), is_attention))

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim every block in the activation table, with attention's outputs to keep."""
        claim_attention_once(context)

    def record(self, target: Target) -> dict[str, Any]:
        """As `attention_output`: one candidate."""
        return record_attention_once()
