"""Recompute one block in n: a dial between no recomputation and all of it (Megatron-LM's block method; Chen et al. 2016)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.errors import ApplyError
from memtune.passes.recompute import recompute_blocks
from memtune.program import Program
from memtune.runtime.context import Context
from memtune.search_spaces.recompute._fits import blocks_of, in_one_graph, why_not
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class EveryNth(Technique):
    """Trades an extra forward of one block in `n` for the activations inside those blocks.

    Distinguishing test: blocks 0, n, 2n, … save nothing inside them, all others save what they saved before.
    """

    kind: Literal["every_nth"] = "every_nth"
    slot: ClassVar[str] = "recompute"
    title: ClassVar[str] = "Recompute one block in n"
    source: ClassVar[str] = "Chen et al. 2016, arXiv:1604.06174; block method of NVIDIA Megatron-LM"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    n: Annotated[int, Field(ge=1)] = 2
    """One block in n is recomputed; larger n keeps more bytes and recomputes less."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs more than n blocks that do not change their input, in eager mode."""
        reason = in_one_graph(target.compiled) or why_not(program.step, False)
        return reason or self._too_few(len(program.step.blocks))

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Blocks 0, n, 2n, … run again in backward."""
        return program.with_step(recompute_blocks(program.step, list(range(0, len(program.step.blocks), self.n))))

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim blocks 0, n, 2n, … in the activation table."""
        regions = blocks_of(context, self.kind)
        reason = self._too_few(len(regions))
        if reason is not None:
            raise ApplyError(
                f"recompute: {{kind: every_nth, n: {self.n}}} does not fit this model.", evidence=f"{reason.text}.",
                fix=reason.fix, code="MT303",
            )  # fmt: skip
        for region in regions[:: self.n]:
            context.activations.claim_recompute(region.index)

    def _too_few(self, blocks: int) -> Reason | None:
        """Why `n` is too large for so many blocks; None if it is not."""
        if self.n == 1 or self.n < blocks:
            return None
        return Reason(f"n={self.n} would recompute one of {blocks} blocks", f"n below {blocks}" if blocks > 2 else "n: 1")

    def record(self, target: Target) -> dict[str, Any]:
        """With n = 1 this is `full`."""
        return {"activations.recompute": {"every": self.n, "keep": "nothing"}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """A third and a quarter of the blocks beside one half."""
        return {"n": (2, 3, 4)}
