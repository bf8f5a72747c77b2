"""Offload saved activations of the blocks to host memory or SSD in forward and reload them in backward,
earliest blocks first.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from memtune import refusals
from memtune.activations.offload import OffloadClaim, Prefetcher, SSDSpill, claimable_bytes, move_activations
from memtune.effects import Effects
from memtune.program import OFFLOAD, SPILL, Program, SavedTensorPolicy
from memtune.runtime import Context
from memtune.search_spaces.offload.activations._block_shares import (
    Runs,
    all_shares,
    leading_bytes,
    shares_by_count,
    shares_of,
    shares_of_blocks,
    to_runs,
)
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Plan, Reason, Target, Technique, no_directory

_PREFETCHED = {"cpu": 6, "ssd": 3}
"""Tensors prefetched by default. From the host, a 7B GPT that offloads everything waits for reloads during 20
% of a step (A100, simulated) with 0, 10 % with 1 and 0.2 % with 2; under selective recompute 12 %, 11 %, 7 %,
and 0.4 % with 6, at 4 % more peak. More tensors gain nothing.
"""


class CopyOutPlan(Plan):
    """Shares of the blocks to offload if blocks differ in size; empty if they do not."""

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
    """Trades two copies over the host link, or to SSD and back, for the device bytes of the blocks' saved
    tensors.

    The first blocks are offloaded entirely and the block at the boundary in part, until `ratio` of the bytes
    is offloaded, to the byte. The last blocks are resident, since backward needs them first. If blocks differ
    in size, a plan has their shares. Reloads are prefetched, last offloaded first. It combines with every
    recompute technique: then the blocks' inputs and kept outputs are offloaded. With SSD (`--offload-dir`) a
    few tensors at a time pass through host memory, every block of data on the drive has a checksum, and the
    bytes written in a step are reported because drives wear.
    """

    kind: Literal["copy_out"] = "copy_out"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (CopyOutPlan,)
    title: ClassVar[str] = "Saved activations to host memory or SSD"
    source: ClassVar[str] = (
        "Rhu et al. 2016, vDNN, arXiv:1602.08124; PyTorch save_on_cpu; Rajbhandari et al. 2021,"
        " arXiv:2104.07857"
    )
    paper: ClassVar[str] = "vDNN"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="uniform")

    ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the blocks' claimable bytes to offload; larger frees more and copies more."""
    min_bytes: Annotated[int, Field(ge=0)] = 65536
    """Smaller tensors are resident: a copy has a fixed cost."""
    target: Literal["cpu", "ssd"] = "cpu"
    """`ssd` needs an offload directory; it frees host memory and costs time and wear."""
    prefetch: Annotated[int, Field(ge=0, le=64)] | None = None
    """Tensors prefetched before backward needs them, overlapped with compute. Default: 3 from SSD, where each
    takes its bytes of host memory; 6 from the host, where each takes its bytes of the device; 0 from the host
    on stages of a pipeline.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        share = "" if self.ratio == 1 else f"{self.ratio:.0%} of "
        where = "SSD" if self.target == "ssd" else "host memory"
        return f"moves {share}the blocks' saved activations to {where} until backward"

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require blocks, eager mode or compiled blocks, and a saved tensor that is large enough."""
        if self.target == "ssd" and (reason := no_directory(target)) is not None:
            return reason
        if not program.step.blocks:
            return refusals.no_blocks_to_offload()
        if target.compiled == "model":
            return refusals.one_graph()
        saved = program.step.saves.storage[program.step.saves.block >= 0]
        if not (program.step.storages.bytes[saved] >= max(self.min_bytes, 1)).any():
            return refusals.no_large_activation(self.min_bytes)
        return None

    def plan(self, program: Program, target: Target) -> CopyOutPlan:
        groups, sizes = _groups(program), claimable_bytes(program.step, self.min_bytes, program.stages)
        each = shares_of(program, self.min_bytes, groups, lambda _, mine: leading_bytes(self.ratio, mine))
        counted = self._equal_shares(program)
        if [round(share * size) for share, size in zip(counted, sizes, strict=True)] == [
            round(share * size) for share, size in zip(each, sizes, strict=True)
        ]:
            return CopyOutPlan()
        return CopyOutPlan(ratio=self.ratio, shares=to_runs(program, each))

    def _equal_shares(self, program: Program) -> list[float]:
        """Return the shares of the blocks as if they had the same size."""
        found = [0.0] * len(program.step.blocks)
        for blocks in _groups(program):
            for block, share in zip(blocks, shares_by_count(self.ratio, len(blocks)), strict=True):
                found[block] = share
        return found

    def rewrite(self, program: Program, plan: CopyOutPlan, target: Target) -> Program:
        """Add D2H copies after each save and H2D copies before each first use, or prefetched."""
        runs = self._runs(plan)
        shares = self._equal_shares(program) if runs is None else all_shares(runs)
        claims = [
            OffloadClaim(i, share, self.min_bytes, policy=self._policy)
            for i, share in enumerate(shares)
            if share > 0
        ]
        prefetch = self._prefetched(on_stages=program.stages is not None)
        options = {"ssd_prefetch": prefetch} if self.target == "ssd" else {"prefetch": prefetch}
        return program.with_step(move_activations(program.step, claims, stages=program.stages, **options))

    def apply(self, context: Context, plan: CopyOutPlan) -> None:
        """Claim the blocks' shares in the activation table; for SSD check the offload directory.

        Raises:
            ApplyError: The plan was made for another model.
        """
        table, ssd = context.activations, self.target == "ssd"
        regions = table.regions
        prefetch = self._prefetched(on_stages=context.loop.pipeline is not None)
        if ssd:
            offload_dir.checked()
            table.ssd_spill = SSDSpill(prefetch)
            context.checks["offload.activations"] = lambda: {
                "ssd_written_bytes": table.ssd_spill.written_bytes
            }
        else:
            table.prefetcher = Prefetcher(prefetch)
        shares = shares_by_count(self.ratio, len(regions))
        if (runs := self._runs(plan)) is not None:
            try:
                shares = shares_of_blocks(runs, table.stages or [0] * len(regions))
            except ValueError as error:
                raise refusals.plan_of_other_model(
                    "offload.activations: {kind: copy_out}", f"It has {error}."
                ) from error
        for region, share in zip(regions, shares, strict=True):
            if share > 0:
                table.claim_move(region.index, share, self.min_bytes, policy=self._policy)

    @property
    def _policy(self) -> SavedTensorPolicy:
        return SPILL if self.target == "ssd" else OFFLOAD

    def _runs(self, plan: CopyOutPlan) -> Runs | None:
        """Return the planned shares; None (equal blocks) if the ratio was edited after planning."""
        return plan.shares if plan.ratio == self.ratio else None

    def _prefetched(self, *, on_stages: bool) -> int:
        """Return the number of prefetched tensors."""
        # On stages of a pipeline the last offloaded tensors belong to a micro-batch whose backward comes much
        # later.
        if self.target == "cpu" and on_stages:
            return 0
        return self.prefetch if self.prefetch is not None else _PREFETCHED[self.target]

    def record(self, target: Target) -> dict[str, Any]:
        knobs = {
            "prefetch": self._prefetched(on_stages=False),
            "ratio": self.ratio,
            "min_bytes": self.min_bytes,
        }
        return {"activations.move": {"tier": "host" if self.target == "cpu" else "ssd", **knobs}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"ratio": (1.0, 0.5, 0.25), "target": ("cpu", "ssd")}


def _groups(program: Program) -> list[list[int]]:
    """Return the blocks of each rank, in their order."""
    stages, n_blocks = program.stages, len(program.step.blocks)
    if stages is None:
        return [list(range(n_blocks))]
    ranks = range(stages.ranks)
    return [
        [block for stage in stages.of_rank(rank) for block in stages.blocks(stage, n_blocks)]
        for rank in ranks
    ]
