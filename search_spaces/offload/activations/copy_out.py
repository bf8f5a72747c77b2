"""Move saved activations of the blocks to host memory in forward and back in backward, earliest blocks first."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.passes.move import MoveClaim, move_activations
from memtune.program import Program
from memtune.runtime.context import Context
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class CopyOut(Technique):
    """Trades two copies over the host link for the device bytes of what the blocks save.

    The first `ratio` of the blocks is moved whole, the block at the boundary in part: the last blocks are the first
    that backward asks for, so they stay. Composes with every recompute: then the blocks' inputs and kept outputs move.

    Distinguishing test: exactly the claimed share of the saved bytes crosses the link, once down and once up.
    """

    kind: Literal["copy_out"] = "copy_out"
    slot: ClassVar[str] = "offload.activations"
    title: ClassVar[str] = "Saved activations to host memory"
    source: ClassVar[str] = "Rhu et al. 2016, vDNN, arXiv:1602.08124; PyTorch save_on_cpu"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the blocks' claimable bytes that moves; larger frees more and copies more."""
    min_bytes: Annotated[int, Field(ge=0)] = 65536
    """Smaller tensors stay: a copy has a fixed cost."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks, in eager mode, and something in them that is large enough."""
        if not program.step.blocks:
            return Reason("the model has no blocks whose activations could move", "def blocks(model) in model.py")
        if target.compiled == "model":
            return Reason("one graph holds all blocks", "execution: {compile: blocks}")
        saved = program.step.save_storage[program.step.save_block >= 0]
        if not (program.step.bytes[saved] >= max(self.min_bytes, 1)).any():
            return Reason(f"no saved activation has {self.min_bytes} bytes", "a smaller min_bytes")
        return None

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Copies out after each save, copies back before each first use."""
        claims = [MoveClaim(i, share, self.min_bytes) for i, share in enumerate(self._shares(len(program.step.blocks)))]
        return program.with_step(move_activations(program.step, claims))

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim the blocks' shares in the activation table."""
        regions = context.activations.regions
        for region, share in zip(regions, self._shares(len(regions)), strict=True):
            if share > 0:
                context.activations.claim_move(region.index, share, self.min_bytes)

    def _shares(self, n_blocks: int) -> list[float]:
        """Share of each block: 1 for the first `ratio` of them, the rest of it for the next, 0 for the last."""
        return [min(max(self.ratio * n_blocks - i, 0.0), 1.0) for i in range(n_blocks)]

    def record(self, target: Target) -> dict[str, Any]:
        """Where the activations go, and how many."""
        return {"activations.move": {"tier": "host", "ratio": self.ratio, "min_bytes": self.min_bytes}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """All, a half and a quarter."""
        return {"ratio": (1.0, 0.5, 0.25)}
