"""Offload saved activations while a stage works on other micro-batches, as few as a budget needs (Yuan)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from memtune import refusals
from memtune.activations.offload import Prefetcher, Slots
from memtune.effects import Effects
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces import active
from memtune.search_spaces._plan_fields import Bytes
from memtune.search_spaces.offload.activations._block_shares import (
    Runs,
    all_shares,
    shares_of_blocks,
    to_runs,
)
from memtune.search_spaces.offload.activations._pipeline_ratio import (
    GRAIN,
    Ratios,
    bytes_by_stage,
    most_tensors_of_a_block,
    offloaded,
    ratios_by_stage,
    shares,
    solve_ratios,
    stages_with_slots,
)
from memtune.search_spaces.recompute._block_planner.budget import later_techniques
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_budget, format_bytes

_PIPELINED = "offload.activations: {kind: pipelined}"
_MOST_PREFETCHED = 4096


class PipelinedOutcome(BaseModel):
    """Predicted bytes of a plan, for `explain`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    peak_bytes: Bytes | None = None
    """Peak of the fullest rank; none if the ratio is given."""
    plain_bytes: Bytes | None = None
    """The same without this technique."""
    offloaded_bytes: tuple[Bytes, ...]
    """(stages,) bytes that are offloaded for each micro-batch."""


class PipelinedPlan(Plan):
    """Share of each block to offload, and number of prefetched tensors."""

    ratios: tuple[Annotated[float, Field(ge=0, le=1)], ...]
    """(stages,) share of each stage's bytes."""
    shares: Runs
    """Shares of the blocks' bytes, by stage, as pairs of a share and the number of blocks in a row that have
    it.
    """
    prefetch: Annotated[int, Field(ge=0, le=_MOST_PREFETCHED)]
    """Tensors that are prefetched."""
    predicted: PipelinedOutcome
    """Predicted bytes of the plan."""


class Pipelined(Technique):
    """Trades copies over the host link, overlapped with other micro-batches of a pipeline's stage, for saved
    activations.

    Under 1F1B stage i of p holds up to p - i micro-batches, each for p - i - 1 forwards and as many backwards
    of others. Tensors that a stage saves for a micro-batch are offloaded during its forward and the slot
    after it, and reloaded in the slot before its backward. So a direction of the link has the time of a
    forward and a backward for a ratio r of A bytes, and no copy is exposed while r·A ≤ B·(t_F + t_B). The
    device holds (1 - r)·(p - i)·A + 2·r·A. Stages with fewer than two slots in between (the last two under
    1F1B) keep everything resident.

    r is solved by rank, since earlier stages hold more: the smallest in eighths under which the rank stays
    within the budget. Without a pipeline the slots are layers: an equal share of all blocks but the last is
    offloaded while the next block runs, and reloaded while the block after it runs backward; r is given, or
    the smallest within `budget_bytes` after every later pass.
    """

    kind: Literal["pipelined"] = "pipelined"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (PipelinedPlan,)
    title: ClassVar[str] = "Saved activations to the host in the slots of a pipeline"
    source: ClassVar[str] = (
        "Yuan et al. 2024, Accelerating the Training of Large Language Models using Efficient Activation"
        " Rematerialization and Optimal Hybrid Parallelism, USENIX ATC 24, section 4"
    )
    paper: ClassVar[str] = "Yuan et al. 2024"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(
        activations="stage", eager_only="tensors to prefetch together are counted in the eager step"
    )

    ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Ratio of every stage that has slots for it; larger frees more and copies more. Default: the smallest
    that fits, by rank.
    """
    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Peak to stay within if no ratio is given. Default: in a pipeline all memory of the target."""
    min_bytes: Annotated[int, Field(ge=0)] = 1 << 20
    """Smaller tensors are resident: a copy has a fixed cost."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        if self.ratio is None:
            few = "moves as few saved activations to host memory as needed"
            return f"{few} {format_budget(self.budget_bytes, None)}, between micro-batches"
        return f"moves {self.ratio:.0%} of the saved activations to host memory between micro-batches"

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require a budget the step exceeds and some ratio meets; in a pipeline also stages with slots."""
        if not program.step.blocks:
            return refusals.no_blocks_to_offload()
        if target.compiled:
            return Reason(self.effects.eager_only, "execution.compile: false")
        stages, budget = program.stages, self._budget(program, target)
        if self.ratio is None and budget is None:
            return Reason(
                "there is no budget to plan for: without a pipeline the target's is not used",
                "offload.activations: {kind: pipelined, budget_bytes: 20000000000}, or ratio: 0.5, or tsplit",
            )
        if stages is not None and not any(stages_with_slots(stages, program.accumulate)):
            return Reason(
                f"no micro-batch waits for two slots on any of {len(stages.starts)} stages under"
                f" {stages.schedule}",
                "more stages or micro-batches, or offload.activations: {kind: copy_out}",
            )
        saved = program.step.saves.storage[program.step.saves.block >= 0]
        if not (program.step.storages.bytes[saved] >= max(self.min_bytes, 1)).any():
            return refusals.no_large_activation(self.min_bytes)
        return (
            None
            if self.ratio is not None
            else self._misses(self._smallest(program, target), int(budget or 0))
        )

    def _misses(self, found: Ratios, budget_bytes: int) -> Reason | None:
        if max(found.plain_bytes) <= budget_bytes:
            return refusals.fits_already("offload.activations: {kind: none}")
        if max(found.peak_bytes) > budget_bytes:
            return Reason(
                f"no ratio stays within {format_bytes(budget_bytes)}: the most gives"
                f" {format_bytes(max(found.peak_bytes))}",
                "a smaller micro-batch, recompute, or sharding or offload of states",
            )
        return None

    def _smallest(self, program: Program, target: Target) -> Ratios:
        run = program.ranks, program.micro_batch, program.accumulate
        later = later_techniques(target, self.slot)
        budget = self._budget(program, target) or 0
        how = self.min_bytes, self._prefetched(program, target)
        return solve_ratios(program.step, program.stages, run, how, budget, later, target.hardware)

    def _budget(self, program: Program, target: Target) -> int | None:
        """Return the budget to plan for."""
        # Without a pipeline the target's budget is not used: searches then propose `tsplit` and `copy_out`.
        return self.budget_bytes or (target.budget_bytes if program.stages is not None else None)

    def _prefetched(self, program: Program, target: Target) -> int:
        """Return the number of prefetched tensors."""
        # A recomputed block reads its saved tensors in an order of its own, which the order of saves does not
        # predict.
        again = active(target, "recompute") is not None
        return (
            0
            if again or program.stages is not None
            else most_tensors_of_a_block(program.step, self.min_bytes)
        )

    def plan(self, program: Program, target: Target) -> PipelinedPlan:
        ranks = program.stages.ranks if program.stages else 1
        peaks: dict[str, Any] = {}
        if self.ratio is not None:
            ratios = ratios_by_stage(program, [self.ratio] * ranks)
        else:
            found = self._smallest(program, target)
            ratios = ratios_by_stage(program, [each / GRAIN for each in found.eighths])
            peaks = {"peak_bytes": max(found.peak_bytes), "plain_bytes": max(found.plain_bytes)}
        each = shares(program, ratios, self.min_bytes)
        moved_bytes = tuple(bytes_by_stage(program, each, self.min_bytes))
        return PipelinedPlan(
            ratios=tuple(ratios),
            shares=to_runs(program, each),
            prefetch=self._prefetched(program, target),
            predicted=PipelinedOutcome(**peaks, offloaded_bytes=moved_bytes),
        )

    def rewrite(self, program: Program, plan: PipelinedPlan, target: Target) -> Program:
        """Add D2H copies after each save and H2D copies before backward; a pipeline moves them into slots."""
        return offloaded(program, all_shares(plan.shares), self.min_bytes, plan.prefetch)

    def apply(self, context: Context, plan: PipelinedPlan) -> None:
        """Claim the blocks' shares in the activation table, which follows the slots from here on.

        Raises:
            ApplyError: The plan was made for another model.
        """
        table = context.activations
        try:
            each = shares_of_blocks(plan.shares, table.stages or [0] * len(table.regions))
        except ValueError as error:
            raise refusals.plan_of_other_model(_PIPELINED, f"It has {error}.") from error
        if (context.loop.pipeline is None) != (len(plan.shares) == 1):
            raise refusals.plan_of_other_model(_PIPELINED, f"It is for {len(plan.shares)} stages.")
        if context.loop.pipeline is None:
            table.prefetcher = Prefetcher(plan.prefetch)
        else:
            table.slots = slots = Slots()
            context.checks[self.slot] = lambda: {"moments": len(slots.trace)}
        for region, share in zip(table.regions, each, strict=True):
            if share > 0:
                table.claim_move(region.index, share, self.min_bytes)

    def explain(self, plan: PipelinedPlan) -> tuple[str, ...]:
        ratios = ", ".join(f"{each:g}" for each in plan.ratios)
        sent = ", ".join(format_bytes(each) for each in plan.predicted.offloaded_bytes)
        return (f"ratio {ratios} by stage; {sent} are offloaded and reloaded for each micro-batch",)

    def record(self, target: Target) -> dict[str, Any]:
        knobs = self.ratio if self.ratio is not None else {"budget": self.budget_bytes or target.budget_bytes}
        return {
            "activations.move": {
                "tier": "host",
                "in_slots": True,
                "ratio": knobs,
                "min_bytes": self.min_bytes,
            }
        }

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"ratio": (None,)}
