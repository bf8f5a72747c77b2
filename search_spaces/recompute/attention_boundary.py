"""Recompute from one attention to the next: its output and log-sum-exp are kept, q, k and v recomputed
(DistFlashAttn).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.activations.schedules import block_regions_of, region_of
from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.hardware import Hardware, op_costs
from memtune.program import Program, Schedule, Step
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes
from memtune.search_spaces._support import needs_calls_of_blocks
from memtune.search_spaces.recompute._block_planner.fits import NO_BLOCKS, no_attention
from memtune.search_spaces.recompute._schedule_planner.attention_boundaries import (
    ALTERNATIVE,
    BlockBoundaries,
    Boundaries,
    block_boundary_schedules,
    boundary_schedule,
)
from memtune.search_spaces.recompute._schedule_planner.block_schedules import (
    BlockSchedulesPlan,
    apply_block_schedules,
    block_plan_fields,
    cannot_schedule_blocks,
    install_blocks,
    rewrite_by_block_schedules,
)
from memtune.search_spaces.recompute._schedule_planner.region_placement import (
    SCHEDULED,
    Placement,
    SchedulePlan,
    cannot_schedule_model,
    placement_of,
)
from memtune.search_spaces.recompute._schedule_planner.schedule_search import (
    install_schedule,
    rewrite_by_schedule,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class BoundaryPlan(SchedulePlan):
    """A schedule of the whole model that is cut at attention's outputs, with its bytes and time."""

    residual_every: Annotated[int, Field(ge=1)]
    """Number of attentions from one kept residual stream to the next."""
    kept_bytes: Bytes
    """Bytes that the model keeps for backward."""
    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    recompute_s: float
    """Seconds of recomputation in a micro-batch."""


class BlockBoundariesPlan(BlockSchedulesPlan):
    """A schedule for each block that is cut at attention's outputs, with their bytes and time."""

    kept_bytes: Bytes
    """Bytes that the blocks keep for backward."""
    recompute_s: float
    """Seconds of recomputation in a micro-batch."""
    peak_bytes: Bytes | None = None
    """Peak of the whole program; None if what the blocks keep is offloaded."""


class AttentionBoundary(Technique):
    """Keeps one hidden state per block, attention's output, and recomputes everything else but attention.

    DistFlashAttn moves the cuts of checkpointing from the edges of blocks to attention's outputs: a region is
    output projection, MLP, norm and the next block's q, k and v. `attention_output` keeps the residual stream
    as well as attention's output, two hidden states per block; this technique keeps the residual stream at
    every k-th region only and recomputes it in between. Regions cross the edges of blocks, so a schedule
    replaces the model's forward and backward. Where parameters are loaded or unsharded block by block, each
    block has a schedule of its own and keeps its input.
    """

    kind: Literal["attention_boundary"] = "attention_boundary"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (BoundaryPlan, BlockBoundariesPlan)
    title: ClassVar[str] = "Recompute from attention to attention"
    clause: ClassVar[str] = (
        "recomputes everything but attention in backward, from one attention output to the next"
    )
    source: ClassVar[str] = (
        "Li et al. 2024, DistFlashAttn, arXiv:2310.03294, rematerialization-aware checkpointing"
    )
    paper: ClassVar[str] = "DistFlashAttn"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = SCHEDULED

    residual_every: Annotated[int, Field(ge=1)] | None = None
    """Keep the residual stream at every n-th attention and recompute it in between: a larger n keeps less
    and recomputes more at once. Default: the square root of the number of attentions, which needs the least
    memory. By blocks: of the attentions of one block.
    """

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse no fused attention, data-dependent ops, and mechanisms that act inside the model."""
        if not program.step.blocks:
            return NO_BLOCKS
        by_blocks = needs_calls_of_blocks(target)
        cannot_run = cannot_schedule_blocks if by_blocks else cannot_schedule_model
        reason = no_attention(program.step) or cannot_run(program, target)
        if reason is not None:
            return reason
        find = block_boundary_schedules if by_blocks else boundary_schedule
        found = find(program.step, self.residual_every)
        if isinstance(found, str):
            return Reason(found, ALTERNATIVE)
        return found if isinstance(found, Reason) else None

    def plan(self, program: Program, target: Target) -> BoundaryPlan | BlockBoundariesPlan:
        if needs_calls_of_blocks(target):
            return _by_blocks(placement_of(program, target), self.residual_every)
        step = program.step
        found = boundary_schedule(program.step, self.residual_every)
        region = region_of(program.step)
        if not isinstance(found, Boundaries) or isinstance(region, str):
            raise _uncut(str(found))
        op_s = op_costs(step, target.hardware).op_s[region.rows]
        return BoundaryPlan(
            schedule=found.schedule,
            residual_every=found.every,
            kept_bytes=int(region.bytes[list(found.kept)].sum()),
            peak_bytes=placement_of(program, target).peak_bytes(found.schedule),
            recompute_s=round(float(op_s[found.schedule.computes()].sum() - op_s.sum()), 9),
        )

    def rewrite(self, program: Program, plan: BoundaryPlan | BlockBoundariesPlan, target: Target) -> Program:
        """Return the program with the model's ops in the order of the schedules."""
        if isinstance(plan, BlockBoundariesPlan):
            return rewrite_by_block_schedules(plan, program, self.kind)
        return rewrite_by_schedule(plan, program)

    def apply(self, context: Context, plan: BoundaryPlan | BlockBoundariesPlan) -> None:
        """Replace the forwards by the executors of the schedules, and add audit checks that they ran."""
        if isinstance(plan, BlockBoundariesPlan):
            install_blocks(plan, context, self.kind)
            return
        install_schedule(plan, context, made_by=self.kind)

    def record(self, target: Target) -> dict[str, Any]:
        return {"activations.recompute": {"regions": "attention", "residual_every": self.residual_every}}


def _uncut(why: str, fix: str = ALTERNATIVE) -> ApplyError:
    return ApplyError(
        "recompute: {kind: attention_boundary} cannot cut this model.",
        evidence=f"{why}.",
        fix=fix,
        code="MT316",
    )


@lru_cache(maxsize=64)
def _by_blocks(place: Placement, every: int | None) -> BlockBoundariesPlan:
    """Return the plan with a schedule per block."""
    # Its peak only if no other technique offloads what the blocks keep.
    decided, schedules = _schedules(place.step, every, place.hardware)
    if any(each.slot == "offload.activations" for each in place.later):
        return BlockBoundariesPlan(**decided)
    return BlockBoundariesPlan(
        **decided,
        peak_bytes=place.after_later_passes(apply_block_schedules(place.step, schedules)).peak_bytes(),
    )


@lru_cache(maxsize=8)
def _schedules(
    step: Step, every: int | None, hardware: Hardware
) -> tuple[dict[str, Any], tuple[Schedule, ...]]:
    """Return the plan's fields and the schedule of each block, independent of the later passes."""
    found, regions = block_boundary_schedules(step, every), block_regions_of(step)
    if not isinstance(found, BlockBoundaries):
        raise _uncut(found.text, found.fix)
    if isinstance(regions, str):
        raise _uncut(regions)
    op_s = op_costs(step, hardware).op_s[regions.together.rows]
    pairs = zip(regions.ops, found.schedules, strict=True)
    recompute_s = sum(float(op_s[ops[each.computes()]].sum() - op_s[ops].sum()) for ops, each in pairs)
    decided = block_plan_fields(regions, found.schedules)
    return {**decided, "kept_bytes": found.kept_bytes, "recompute_s": round(recompute_s, 9)}, found.schedules
