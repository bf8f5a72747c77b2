"""Move saved activations of the blocks to host memory or SSD in forward and back in backward, earliest blocks first."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.passes.move import MoveClaim, move_activations
from memtune.program import Program
from memtune.runtime import offload_dir
from memtune.runtime.context import Context
from memtune.runtime.shelf import Shelf
from memtune.search_spaces.offload.activations._shares import leading, shares_of
from memtune.technique import Exactness, Plan, Reason, Target, Technique, no_directory


class CopyOut(Technique):
    """Trades two copies over the host link, or on to SSD, for the device bytes of what the blocks save.

    The first `ratio` of the blocks is moved whole, the block at the boundary in part: the last blocks are the first
    that backward asks for, so they stay. Composes with every recompute: then the blocks' inputs and kept outputs move.
    On SSD (`--offload-dir`) a few tensors at a time pass through host memory, every block of them carries a checksum, and
    drives wear: the bytes written in a step are shown.

    Distinguishing test: exactly the claimed share of the saved bytes crosses the link, once down and once up; for SSD it is
    written once and read once, and host memory never holds more than a few tensors.
    """

    kind: Literal["copy_out"] = "copy_out"
    slot: ClassVar[str] = "offload.activations"
    title: ClassVar[str] = "Saved activations to host memory or SSD"
    source: ClassVar[str] = (
        "Rhu et al. 2016, vDNN, arXiv:1602.08124; PyTorch save_on_cpu; Rajbhandari et al. 2021, arXiv:2104.07857"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the blocks' claimable bytes that moves; larger frees more and copies more."""
    min_bytes: Annotated[int, Field(ge=0)] = 65536
    """Smaller tensors stay: a copy has a fixed cost."""
    target: Literal["cpu", "ssd"] = "cpu"
    """`ssd` needs an offload directory; it frees host memory and costs time and wear."""
    ahead: Annotated[int, Field(ge=0, le=64)] = 3
    """Tensors read from SSD before backward asks for them; each takes its bytes of host memory."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks, in eager mode, and something in them that is large enough."""
        if self.target == "ssd" and (reason := no_directory(target)) is not None:
            return reason
        if self.target == "ssd" and program.stages is not None:
            return Reason("tensors of several micro-batches on SSD are not built", "target: cpu")
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
        shares, stages = shares_of(program, lambda n: leading(self.ratio, n)), program.stages
        claims = [MoveClaim(i, share, self.min_bytes) for i, share in enumerate(shares)]
        ahead = self.ahead if self.target == "ssd" else None
        return program.with_step(move_activations(program.step, claims, ahead, stages=stages))

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim the blocks' shares in the activation table; for SSD the offload directory must be usable."""
        table, ssd = context.activations, self.target == "ssd"
        regions = table.regions
        if ssd:
            offload_dir.checked()
            table.shelf = Shelf(self.ahead)
            context.checks["offload.activations"] = lambda: {"ssd_written_bytes": table.shelf.written_bytes}
        for region, share in zip(regions, leading(self.ratio, len(regions)), strict=True):
            if share > 0:
                table.claim_move(region.index, share, self.min_bytes, ssd=ssd)

    def record(self, target: Target) -> dict[str, Any]:
        """Where the activations go, and how many."""
        where = {"tier": "host"} if self.target == "cpu" else {"tier": "ssd", "ahead": self.ahead}
        return {"activations.move": {**where, "ratio": self.ratio, "min_bytes": self.min_bytes}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """All, a half and a quarter; SSD where a directory was given."""
        return {"ratio": (1.0, 0.5, 0.25), "target": ("cpu", "ssd")}
