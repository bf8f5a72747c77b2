"""Move saved activations of the blocks to host memory or SSD in forward and back in backward, earliest blocks
first.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from memtune.activations.offload import OffloadClaim, Prefetcher, SSDSpill, claimable_bytes, move_activations
from memtune.effects import Effects
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.offload.activations._block_shares import (
    Runs,
    by_count,
    leading,
    of_all,
    of_another,
    of_runs,
    shares_of,
    to_runs,
)
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Plan, Reason, Target, Technique, no_directory

_AHEAD = {"cpu": 6, "ssd": 3}
"""From the host: a 7B GPT that moves everything waits for what comes back for 20 % of a step (A100,
simulated) with 0 ahead, 10 % with 1, 0.2 % with 2; under selective recompute 12 %, 11 %, 7 %, and 0.4 % with
6, at 4 % more peak. More gain nothing.
"""


class CopyOutPlan(Plan):
    """The share of each block that is offloaded, where blocks differ in size; empty where they do not."""

    ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the bytes of all blocks; the plan holds for this value of the knob alone."""
    shares: Runs | None = None
    """Shares of the blocks' bytes, by stage, as pairs of a share and the number of blocks in a row that have
    it.
    """

    @model_validator(mode="after")
    def _says_both(self) -> Self:
        if (self.ratio is None) != (self.shares is None):
            raise ValueError("ratio and shares are given together")
        return self


class CopyOut(Technique):
    """Trades two copies over the host link, or on to SSD, for the device bytes of what the blocks save.

    The first blocks are moved whole, the block at the boundary in part, until `ratio` of the bytes has left,
    to the byte: the last blocks are the first that backward asks for, so they stay. Where blocks are not all
    as large, a plan has their shares. What left last comes back `ahead` of its use. Composes with every
    recompute: then the blocks' inputs and kept outputs move. On SSD (`--offload-dir`) a few tensors at a time
    pass through host memory, every block of them carries a checksum, and drives wear: the bytes written in a
    step are shown.

    Distinguishing test: exactly the claimed share of the saved bytes crosses the link, once down and once up,
    and is waited for where nothing comes ahead; for SSD it is written once and read once, and host memory
    never holds more than a few tensors.
    """

    kind: Literal["copy_out"] = "copy_out"
    slot: ClassVar[str] = "offload.activations"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (CopyOutPlan,)
    title: ClassVar[str] = "Saved activations to host memory or SSD"
    source: ClassVar[str] = (
        "Rhu et al. 2016, vDNN, arXiv:1602.08124; PyTorch save_on_cpu; Rajbhandari et al. 2021,"
        " arXiv:2104.07857"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="uniform")

    ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the blocks' claimable bytes that moves; larger frees more and copies more."""
    min_bytes: Annotated[int, Field(ge=0)] = 65536
    """Smaller tensors stay: a copy has a fixed cost."""
    target: Literal["cpu", "ssd"] = "cpu"
    """`ssd` needs an offload directory; it frees host memory and costs time and wear."""
    ahead: Annotated[int, Field(ge=0, le=64)] | None = None
    """Tensors that come before backward asks for them, beside compute. Left out: 3 from SSD, where each takes
    its bytes of host memory, 6 from the host, where each takes its bytes of the device; on stages of a
    pipeline none from the host.
    """

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks, in eager mode, and something in them that is large enough."""
        if self.target == "ssd" and (reason := no_directory(target)) is not None:
            return reason
        if not program.step.blocks:
            return Reason(
                "the model has no blocks whose activations could move", "def blocks(model) in model.py"
            )
        if target.compiled == "model":
            return Reason("one graph holds all blocks", "execution: {compile: blocks}")
        saved = program.step.saves.storage[program.step.saves.block >= 0]
        if not (program.step.storages.bytes[saved] >= max(self.min_bytes, 1)).any():
            return Reason(f"no saved activation has {self.min_bytes} bytes", "a smaller min_bytes")
        return None

    def plan(self, program: Program, target: Target) -> CopyOutPlan:
        """The share of each block; nothing to decide where they are as large as each other."""
        groups, sizes = _groups(program), claimable_bytes(program.step, self.min_bytes, program.stages)
        each = shares_of(program, self.min_bytes, groups, lambda _, mine: leading(self.ratio, mine))
        counted = self._counted(program)
        if [round(share * size) for share, size in zip(counted, sizes, strict=True)] == [
            round(share * size) for share, size in zip(each, sizes, strict=True)
        ]:
            return CopyOutPlan()
        return CopyOutPlan(ratio=self.ratio, shares=to_runs(program, each))

    def _counted(self, program: Program) -> list[float]:
        """Shares of blocks that are as large as each other."""
        found = [0.0] * len(program.step.blocks)
        for blocks in _groups(program):
            for block, share in zip(blocks, by_count(self.ratio, len(blocks)), strict=True):
                found[block] = share
        return found

    def rewrite(self, program: Program, plan: CopyOutPlan, target: Target) -> Program:
        """Copies out after each save, copies back before each first use or ahead of that."""
        runs = self._runs(plan)
        shares = self._counted(program) if runs is None else of_all(runs)
        claims = [OffloadClaim(i, share, self.min_bytes) for i, share in enumerate(shares) if share > 0]
        ahead = self._ahead(on_stages=program.stages is not None)
        how = {"ssd_ahead": ahead} if self.target == "ssd" else {"ahead": ahead}
        return program.with_step(move_activations(program.step, claims, stages=program.stages, **how))

    def apply(self, context: Context, plan: CopyOutPlan) -> None:
        """Claim the blocks' shares in the activation table; for SSD the offload directory must be usable.

        Raises:
            ApplyError: The plan was made for another model.
        """
        table, ssd = context.activations, self.target == "ssd"
        regions = table.regions
        ahead = self._ahead(on_stages=context.loop.pipeline is not None)
        if ssd:
            offload_dir.checked()
            table.shelf = SSDSpill(ahead)
            context.checks["offload.activations"] = lambda: {"ssd_written_bytes": table.shelf.written_bytes}
        else:
            table.ahead = Prefetcher(ahead)
        shares = by_count(self.ratio, len(regions))
        if (runs := self._runs(plan)) is not None:
            try:
                shares = of_runs(runs, table.stages or [0] * len(regions))
            except ValueError as error:
                raise of_another("copy_out", f"It has {error}.") from error
        for region, share in zip(regions, shares, strict=True):
            if share > 0:
                table.claim_move(region.index, share, self.min_bytes, ssd=ssd)

    def _runs(self, plan: CopyOutPlan) -> Runs | None:
        """Return the planned shares; None after the ratio was changed by hand, which is for blocks that are
        alike.
        """
        return plan.shares if plan.ratio == self.ratio else None

    def _ahead(self, *, on_stages: bool) -> int:
        """On stages of a pipeline what left last is of a micro-batch whose backward comes late."""
        if self.target == "cpu" and on_stages:
            return 0
        return self.ahead if self.ahead is not None else _AHEAD[self.target]

    def record(self, target: Target) -> dict[str, Any]:
        """Where the activations go, and how many."""
        how = {"ahead": self._ahead(on_stages=False), "ratio": self.ratio, "min_bytes": self.min_bytes}
        return {"activations.move": {"tier": "host" if self.target == "cpu" else "ssd", **how}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """All, a half and a quarter; SSD where a directory was given."""
        return {"ratio": (1.0, 0.5, 0.25), "target": ("cpu", "ssd")}


def _groups(program: Program) -> list[list[int]]:
    """The blocks that each rank has, in their order."""
    stages, n_blocks = program.stages, len(program.step.blocks)
    if stages is None:
        return [list(range(n_blocks))]
    ranks = range(stages.ranks)
    return [
        [block for stage in stages.of_rank(rank) for block in stages.blocks(stage, n_blocks)]
        for rank in ranks
    ]
