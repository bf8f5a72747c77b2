"""Recompute every block in backward and keep only its input (Chen et al. 2016, Algorithm 1)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.activations.recompute import recompute_blocks
from memtune.effects import Effects
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.recompute._block_planner.fits import (
    cannot_recompute,
    holds_blocks_in_one_graph,
    no_blocks,
)
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique


class Full(Technique):
    """Frees all activations inside the blocks and runs every block's forward a second time."""

    kind: Literal["full"] = "full"
    title: ClassVar[str] = "Recompute every block"
    clause: ClassVar[str] = "recomputes every block in backward"
    source: ClassVar[str] = (
        "Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174"
    )
    paper: ClassVar[str] = "Chen et al. 2016"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="uniform")

    def refuses(self, facts: Facts) -> Reason | None:
        return no_blocks(facts)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse blocks that change their input, and one compiled graph for all blocks."""
        return holds_blocks_in_one_graph(target.compiled) or cannot_recompute(program.step, False)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Return the program with every block run again before its first backward op that needs it."""
        return program.with_step(recompute_blocks(program.step, list(range(len(program.step.blocks)))))

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim every block in the activation table."""
        for region in context.activations.regions:
            context.activations.claim_recompute(region.index)

    def record(self, target: Target) -> dict[str, Any]:
        return {"activations.recompute": {"every": 1, "keep": "nothing"}}
