"""Recompute one block in n (Megatron-LM's block method; Chen et al. 2016)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

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


class EveryNth(Technique):
    """Frees the activations inside one block in `n` and runs the forward of those blocks a second time."""

    kind: Literal["every_nth"] = "every_nth"
    title: ClassVar[str] = "Recompute one block in n"
    source: ClassVar[str] = "Chen et al. 2016, arXiv:1604.06174; block method of NVIDIA Megatron-LM"
    paper: ClassVar[str] = "Chen et al. 2016"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="block")

    n: Annotated[int, Field(ge=1)] = 2
    """One block in n is recomputed; larger n keeps more bytes and recomputes less."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return f"recomputes one block in {self.n} in backward"

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse n blocks or fewer, blocks that change their input, and one compiled graph for all blocks."""
        reason = holds_blocks_in_one_graph(target.compiled) or cannot_recompute(
            program.step, False, every=self.n
        )
        return reason or self.refuses(Facts.of(program, target))

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Return the program with blocks 0, n, 2n, … run again in backward."""
        return program.with_step(
            recompute_blocks(program.step, list(range(0, len(program.step.blocks), self.n)))
        )

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim blocks 0, n, 2n, … in the activation table."""
        numbers = context.of_own_blocks(range(len(context.all_blocks)))
        for region, number in zip(context.activations.regions, numbers, strict=True):
            if number % self.n == 0:
                context.activations.claim_recompute(region.index)

    def refuses(self, facts: Facts) -> Reason | None:
        if (reason := no_blocks(facts)) is not None or self.n == 1 or self.n < facts.blocks:
            return reason
        fix = f"n below {facts.blocks}" if facts.blocks > 2 else "n: 1"
        return Reason(f"n={self.n} would recompute one of {facts.blocks} blocks", fix, "MT303")

    def record(self, target: Target) -> dict[str, Any]:
        # With n = 1 this is `full`.
        return {"activations.recompute": {"every": self.n, "keep": "nothing"}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"n": (2, 3, 4)}
