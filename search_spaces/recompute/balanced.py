"""Recompute norms and activation functions, keep all else that autograd saved (Yuan et al. 2024)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.activations.recompute import recompute_blocks
from memtune.effects import DISPATCH_MODE, Effects
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.recompute._block_planner.call_selection import (
    CallsPlan,
    calls_by_block,
    frees_saved_tensors,
    inputs_of_products,
    plan_calls,
)
from memtune.search_spaces.recompute._block_planner.fits import cannot_recompute
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class Balanced(Technique):
    """Recomputes norms and activation functions instead of keeping their outputs, the inputs of matrix
    products.

    Attention's inputs and outputs, the residual stream and the outputs of matrix products are kept. Nothing
    else runs twice, except ops that cannot be kept: those that draw random numbers, and tensors that are
    written in place.
    """

    kind: Literal["balanced"] = "balanced"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (CallsPlan,)
    title: ClassVar[str] = "Recompute norms and activation functions"
    clause: ClassVar[str] = "recomputes norms and activation functions in backward"
    source: ClassVar[str] = (
        "Yuan et al. 2024, Accelerating the Training of Large Language Models using Efficient Activation"
        " Rematerialization and Optimal Hybrid Parallelism, USENIX ATC, compute-memory balanced checkpointing"
    )
    paper: ClassVar[str] = "Yuan et al. 2024"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="block", eager_only=DISPATCH_MODE)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse blocks without norms or activation functions before products, and compiled code."""
        reason = cannot_recompute(program.step, target.compiled)
        if reason is None and not frees_saved_tensors(program.step, inputs_of_products):
            return Reason(
                "no norm or activation function in the blocks feeds a matrix product alone",
                "recompute: {kind: full}",
            )
        return reason

    def plan(self, program: Program, target: Target) -> CallsPlan:
        return plan_calls(program.step, inputs_of_products)

    def rewrite(self, program: Program, plan: CallsPlan, target: Target) -> Program:
        """Return the program with norms and activation functions of blocks run again in backward."""
        blocks = list(range(len(program.step.blocks)))
        return program.with_step(recompute_blocks(program.step, blocks, calls_by_block(plan, len(blocks))))

    def apply(self, context: Context, plan: CallsPlan) -> None:
        """Claim every block in the activation table, with the calls that do not run again."""
        calls = context.of_own_blocks(calls_by_block(plan, len(context.all_blocks)))
        for region, each in zip(context.activations.regions, calls, strict=True):
            context.activations.claim_recompute(region.index, each)

    def record(self, target: Target) -> dict[str, Any]:
        return {"activations.recompute": {"every": 1, "keep": "all but inputs of products"}}
