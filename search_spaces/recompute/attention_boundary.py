"""Recompute from one attention to the next: its output and log-sum-exp are kept, q, k and v are rebuilt
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
from memtune.search_spaces.recompute._block_planner import NO_BLOCKS, no_attention
from memtune.search_spaces.recompute._schedule_planner import (
    INSTEAD,
    SCHEDULED,
    BlockBoundaries,
    BlockSchedulesPlan,
    Boundaries,
    Place,
    SchedulePlan,
    boundaries_in_blocks,
    boundaries_of,
    cannot_freeze,
    cannot_run_blocks,
    comes_and_goes,
    install_blocks,
    install_schedule,
    place_of,
    rewritten_by,
    rewritten_by_blocks,
    under_blocks,
    which_by_block,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class BoundaryPlan(SchedulePlan):
    """A schedule of the whole model that is cut at attention's outputs, and what it comes to."""

    residual_every: Annotated[int, Field(ge=1)]
    """Attentions from one kept residual stream to the next."""
    kept_bytes: Bytes
    """Bytes that the model keeps for backward."""
    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    again_s: float
    """Seconds of what runs again in a micro-batch."""


class BlockBoundariesPlan(BlockSchedulesPlan):
    """A schedule for each block that is cut at attention's outputs, and what they come to."""

    kept_bytes: Bytes
    """Bytes that the blocks keep for backward."""
    again_s: float
    """Seconds of what runs again in a micro-batch."""
    peak_bytes: Bytes | None = None
    """Peak of the whole program; none where what the blocks keep is offloaded."""


class AttentionBoundary(Technique):
    """Trades one hidden state per block for a second run of all but attention: what a block keeps is
    attention's output.

    DistFlashAttn moves the cuts of checkpointing from the blocks' edges to attention's outputs, so that a
    region is output projection, MLP, norm and the next block's q, k and v. `attention_output` keeps the
    residual stream beside attention's output, two hidden states per block; here what enters every k-th region
    stays, and is rebuilt in between (`_boundaries.py`, Rules 1 to 3). Regions cross the blocks' edges, so a
    frozen schedule takes the place of the model's forward and backward. Where parameters come and go block by
    block, each block has a schedule of its own and keeps what enters it (Rule 4).

    Distinguishing test: attention's forward runs once per block and step; with k = L, all that L blocks keep
    is L outputs and log-sum-exps of attention, to the byte.
    """

    kind: Literal["attention_boundary"] = "attention_boundary"
    slot: ClassVar[str] = "recompute"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (BoundaryPlan, BlockBoundariesPlan)
    title: ClassVar[str] = "Recompute from attention to attention"
    source: ClassVar[str] = (
        "Li et al. 2024, DistFlashAttn, arXiv:2310.03294, rematerialization-aware checkpointing"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = SCHEDULED

    residual_every: Annotated[int, Field(ge=1)] | None = None
    """The residual stream is kept at every so many attentions and rebuilt between: more keeps less and
    rebuilds more at once. Left out: the square root of their number, which needs the least. By blocks: of the
    attentions of one block.
    """

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks with fused attention, and a model whose ops do not depend on its data, by itself."""
        if not program.step.blocks:
            return NO_BLOCKS
        by_blocks = comes_and_goes(program, target)
        cannot_run = cannot_run_blocks if by_blocks else cannot_freeze
        reason = no_attention(program.step) or cannot_run(program, target)
        if reason is not None:
            return reason
        find = boundaries_in_blocks if by_blocks else boundaries_of
        found = find(program.step, self.residual_every)
        if isinstance(found, str):
            return Reason(found, INSTEAD)
        return found if isinstance(found, Reason) else None

    def plan(self, program: Program, target: Target) -> BoundaryPlan | BlockBoundariesPlan:
        """The schedule, or that of each block, with what it comes to."""
        if comes_and_goes(program, target):
            return _by_blocks(place_of(program, target), self.residual_every)
        step, found, region = (
            program.step,
            boundaries_of(program.step, self.residual_every),
            region_of(program.step),
        )
        if not isinstance(found, Boundaries) or isinstance(region, str):
            raise _uncut(str(found))
        op_s = op_costs(step, target.hardware).op_s[region.rows]
        return BoundaryPlan(
            schedule=found.schedule,
            residual_every=found.every,
            kept_bytes=int(region.bytes[list(found.kept)].sum()),
            peak_bytes=place_of(program, target).peak_bytes(found.schedule),
            again_s=round(float(op_s[found.schedule.computes()].sum() - op_s.sum()), 9),
        )

    def rewrite(self, program: Program, plan: BoundaryPlan | BlockBoundariesPlan, target: Target) -> Program:
        """The model's ops in the order of the schedules."""
        if isinstance(plan, BlockBoundariesPlan):
            return rewritten_by_blocks(plan, program, self.kind)
        return rewritten_by(plan, program)

    def apply(self, context: Context, plan: BoundaryPlan | BlockBoundariesPlan) -> None:
        """Put the executors of the schedules in the place of the forwards; the audit asks whether they
        ran.
        """
        if isinstance(plan, BlockBoundariesPlan):
            install_blocks(plan, context, self.kind)
            return
        install_schedule(plan, context, made_by=self.kind)

    def record(self, target: Target) -> dict[str, Any]:
        """Where the regions are cut."""
        return {"activations.recompute": {"regions": "attention", "residual_every": self.residual_every}}


def _uncut(why: str, fix: str = INSTEAD) -> ApplyError:
    return ApplyError(
        "recompute: {kind: attention_boundary} cannot cut this model.",
        evidence=f"{why}.",
        fix=fix,
        code="MT316",
    )


@lru_cache(maxsize=64)
def _by_blocks(place: Place, every: int | None) -> BlockBoundariesPlan:
    """The plan where each block has a schedule; the peak only where nothing else moves what the blocks
    keep.
    """
    decided, schedules = _schedules(place.step, every, place.hardware)
    if any(each.slot == "offload.activations" for each in place.later):
        return BlockBoundariesPlan(**decided)
    return BlockBoundariesPlan(
        **decided, peak_bytes=place.after(under_blocks(place.step, schedules)).peak_bytes()
    )


@lru_cache(maxsize=8)
def _schedules(
    step: Step, every: int | None, hardware: Hardware
) -> tuple[dict[str, Any], tuple[Schedule, ...]]:
    """By block, whatever comes later; and the fields of a plan that say them."""
    found, regions = boundaries_in_blocks(step, every), block_regions_of(step)
    if not isinstance(found, BlockBoundaries):
        raise _uncut(found.text, found.fix)
    if isinstance(regions, str):
        raise _uncut(regions)
    op_s = op_costs(step, hardware).op_s[regions.together.rows]
    pairs = zip(regions.ops, found.schedules, strict=True)
    again_s = sum(float(op_s[ops[each.computes()]].sum() - op_s[ops].sum()) for ops, each in pairs)
    decided = which_by_block(regions, found.schedules)
    return {**decided, "kept_bytes": found.kept_bytes, "again_s": round(again_s, 9)}, found.schedules
