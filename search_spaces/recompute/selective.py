"""Recompute all but the matrix products and attention of every block: cheap ops run again, expensive ones are kept."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.passes.recompute import recompute_blocks
from memtune.program import Program
from memtune.runtime.context import Context
from memtune.search_spaces.recompute._fits import why_not
from memtune.search_spaces.recompute._keeps import is_matmul_or_attention
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class Selective(Technique):
    """Trades a second run of norms, activations and dropout for their bytes; outputs of matmuls and attention stay.

    Distinguishing test: no matrix product runs twice, and every matmul and attention output of a block is still held.
    """

    kind: Literal["selective"] = "selective"
    slot: ClassVar[str] = "recompute"
    title: ClassVar[str] = "Recompute cheap ops, keep matmuls and attention"
    source: ClassVar[str] = (
        "Korthikanti et al. 2023, Reducing Activation Recomputation in Large Transformer Models, section 5, in the per-op "
        "form of PyTorch's selective checkpointing"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks that do not change their input, in eager mode."""
        return why_not(program.step, target.compiled, is_matmul_or_attention)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Every block runs again in backward, but for its matmuls and attention."""
        blocks = list(range(len(program.step.blocks)))
        return program.with_step(recompute_blocks(program.step, blocks, is_matmul_or_attention))

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim every block in the activation table, with the outputs to keep."""
        for region in context.activations.regions:
            context.activations.claim_recompute(region.index, is_matmul_or_attention)

    def record(self, target: Target) -> dict[str, Any]:
        """All blocks; matmuls and attention kept inside them."""
        return {"activations.recompute": {"every": 1, "keep": "matmul_and_attention"}}
