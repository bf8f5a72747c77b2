"""Saved activations to the host while other micro-batches pass through a pipeline's stage, as few as fit
(Yuan).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from memtune.activations.offload import Prefetcher, Slots
from memtune.effects import Effects
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes
from memtune.search_spaces._support import active
from memtune.search_spaces.offload.activations._block_shares import Runs, of_all, of_another, of_runs, to_runs
from memtune.search_spaces.offload.activations._pipeline_ratio import (
    GRAIN,
    Ratios,
    by_stage,
    bytes_by_stage,
    moved,
    of_a_block,
    shares,
    smallest,
    waiting,
)
from memtune.search_spaces.recompute._block_planner import later_techniques
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_bytes

_MOST_AHEAD = 4096


class Told(BaseModel):
    """What the plan comes to, for `explain`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    peak_bytes: Bytes | None = None
    """Peak of the fullest rank; none where the ratio is given."""
    plain_bytes: Bytes | None = None
    """The same without this technique."""
    moved_bytes: tuple[Bytes, ...]
    """(stages,) bytes that are offloaded for each micro-batch."""


class PipelinedPlan(Plan):
    """How much of each block is offloaded, and what is reloaded ahead of its use."""

    ratios: tuple[Annotated[float, Field(ge=0, le=1)], ...]
    """(stages,) share of each stage's bytes."""
    shares: Runs
    """Shares of the blocks' bytes, by stage, as pairs of a share and the number of blocks in a row that have
    it.
    """
    ahead: Annotated[int, Field(ge=0, le=_MOST_AHEAD)]
    """Tensors that are prefetched."""
    told: Told
    """What that comes to."""


class Pipelined(Technique):
    """Trades copies over the host link, made while a stage works on other micro-batches, for what waits there
    for its backward.

    Under 1F1B stage i of p holds up to p - i micro-batches, each for p - i - 1 forwards and as many backwards
    of others. What a stage saves for a micro-batch leaves during its forward and the slot after it, and comes
    back in the slot before its backward, so a direction of the link has the time of a forward and a backward
    for a ratio r of A bytes: nothing is waited for while r·A ≤ B·(t_F + t_B). The device holds (1 - r)·(p -
    i)·A + 2·r·A, and stages in which fewer than two slots lie in between (the last two under 1F1B) keep
    everything.

    r is decided by rank, earlier stages hold more: the smallest in eighths under which the rank stays within
    the budget. Where there is no pipeline the slots are layers: an equal share of all blocks but the last
    goes while the next block runs, and comes back while the block after it runs backward; r is given, or the
    smallest within `budget_bytes` after every later pass.

    Distinguishing test (`test_copies_keep_to_the_slots_of_the_schedule`): every tensor has arrived a slot
    after its forward's and comes back in the slot before its backward, each stage sends m·r·A, and the peak
    is the formula's; without slots it is not.
    """

    kind: Literal["pipelined"] = "pipelined"
    slot: ClassVar[str] = "offload.activations"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (PipelinedPlan,)
    title: ClassVar[str] = "Saved activations to the host in the slots of a pipeline"
    source: ClassVar[str] = (
        "Yuan et al. 2024, Accelerating the Training of Large Language Models using Efficient Activation"
        " Rematerialization and Optimal Hybrid Parallelism, USENIX ATC 24, section 4"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(
        activations="stage", eager_only="which tensors come back together is seen in the eager step"
    )

    ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """The same on every stage that can use it; left out: the smallest that fits, by rank. Larger frees more
    and copies more.
    """
    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Peak to stay within where no ratio is given; left out: in a pipeline all the memory that the target
    gives.
    """
    min_bytes: Annotated[int, Field(ge=0)] = 1 << 20
    """Smaller tensors stay: a copy has a fixed cost."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs a budget that the step exceeds and some ratio meets, and, in a pipeline, stages where
        micro-batches wait.
        """
        if not program.step.blocks:
            return Reason(
                "the model has no blocks whose activations could move", "def blocks(model) in model.py"
            )
        if target.compiled:
            return Reason(self.effects.eager_only, "execution.compile: false")
        stages, budget = program.stages, self._budget(program, target)
        if self.ratio is None and budget is None:
            return Reason(
                "there is no budget to plan for: without a pipeline it is planned for one of its own",
                "offload.activations: {kind: pipelined, budget_bytes: 20000000000}, or ratio: 0.5, or tsplit",
            )
        if stages is not None and not any(waiting(stages, program.accumulate)):
            return Reason(
                f"no micro-batch waits for two slots on any of {len(stages.starts)} stages under"
                f" {stages.schedule}",
                "more stages or micro-batches, or offload.activations: {kind: copy_out}",
            )
        saved = program.step.saves.storage[program.step.saves.block >= 0]
        if not (program.step.storages.bytes[saved] >= max(self.min_bytes, 1)).any():
            return Reason(f"no saved activation has {self.min_bytes} bytes", "a smaller min_bytes")
        return (
            None
            if self.ratio is not None
            else self._misses(self._smallest(program, target), int(budget or 0))
        )

    def _misses(self, found: Ratios, budget_bytes: int) -> Reason | None:
        if max(found.plain_bytes) <= budget_bytes:
            return Reason("everything fits into the budget as it is", "offload.activations: {kind: none}")
        if max(found.peak_bytes) > budget_bytes:
            return Reason(
                f"no ratio stays within {format_bytes(budget_bytes)}: the most gives"
                f" {format_bytes(max(found.peak_bytes))}",
                "a smaller micro-batch, recompute, or sharding or offload of what is not an activation",
            )
        return None

    def _smallest(self, program: Program, target: Target) -> Ratios:
        run = program.ranks, program.micro_batch, program.accumulate
        later = later_techniques(target, self.slot)
        budget = self._budget(program, target) or 0
        how = self.min_bytes, self._ahead(program, target)
        return smallest(program.step, program.stages, run, how, budget, later, target.hardware)

    def _budget(self, program: Program, target: Target) -> int | None:
        """The target's counts on the stages of a pipeline alone: elsewhere `tsplit` and `copy_out` are what
        searches look at.
        """
        return self.budget_bytes or (target.budget_bytes if program.stages is not None else None)

    def _ahead(self, program: Program, target: Target) -> int:
        """Blocks that run again ask for what they kept in an order of their own, so nothing comes ahead of
        that.
        """
        again = active(target, "recompute") is not None
        return 0 if again or program.stages is not None else of_a_block(program.step, self.min_bytes)

    def plan(self, program: Program, target: Target) -> PipelinedPlan:
        """How much of each block moves, and what that leaves on the device."""
        ranks = program.stages.ranks if program.stages else 1
        told: dict[str, Any] = {}
        if self.ratio is not None:
            ratios = by_stage(program, [self.ratio] * ranks)
        else:
            found = self._smallest(program, target)
            ratios = by_stage(program, [each / GRAIN for each in found.eighths])
            told = {"peak_bytes": max(found.peak_bytes), "plain_bytes": max(found.plain_bytes)}
        each = shares(program, ratios, self.min_bytes)
        moved_bytes = tuple(bytes_by_stage(program, each, self.min_bytes))
        return PipelinedPlan(
            ratios=tuple(ratios),
            shares=to_runs(program, each),
            ahead=self._ahead(program, target),
            told=Told(**told, moved_bytes=moved_bytes),
        )

    def rewrite(self, program: Program, plan: PipelinedPlan, target: Target) -> Program:
        """Copies out after each save and back before the backward of a block or stage; a pipeline's pass puts
        them into slots.
        """
        return moved(program, of_all(plan.shares), self.min_bytes, plan.ahead)

    def apply(self, context: Context, plan: PipelinedPlan) -> None:
        """Claim the blocks' shares in the activation table, which follows the slots from here on.

        Raises:
            ApplyError: The plan was made for another model.
        """
        table = context.activations
        try:
            each = of_runs(plan.shares, table.stages or [0] * len(table.regions))
        except ValueError as error:
            raise of_another("pipelined", f"It has {error}.") from error
        if (context.loop.pipeline is None) != (len(plan.shares) == 1):
            raise of_another("pipelined", f"The config's is for {len(plan.shares)} stages.")
        if context.loop.pipeline is None:
            table.ahead = Prefetcher(plan.ahead)
        else:
            table.slots = slots = Slots()
            context.checks[self.slot] = lambda: {"moments": len(slots.trace)}
        for region, share in zip(table.regions, each, strict=True):
            if share > 0:
                table.claim_move(region.index, share, self.min_bytes)

    def explain(self, plan: PipelinedPlan) -> tuple[str, ...]:
        """The ratio of each rank, and what moves."""
        ratios = ", ".join(f"{each:g}" for each in plan.ratios)
        sent = ", ".join(format_bytes(each) for each in plan.told.moved_bytes)
        return (f"ratio {ratios} by stage; {sent} leave for each micro-batch, and come back",)

    def record(self, target: Target) -> dict[str, Any]:
        """What decides how much moves, and by what slots."""
        how = self.ratio if self.ratio is not None else {"budget": self.budget_bytes or target.budget_bytes}
        return {
            "activations.move": {"tier": "host", "in_slots": True, "ratio": how, "min_bytes": self.min_bytes}
        }

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """The smallest ratio that fits."""
        return {"ratio": (None,)}
