"""Compute any op of the model again, as often as it pays, by an integer program over the whole step (Jain et
al. 2020).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes
from memtune.search_spaces.recompute._schedule_planner import (
    SCHEDULED,
    BlockSchedules,
    BudgetBlocksPlan,
    CheckmateSchedule,
    Exact,
    SchedulePlan,
    cannot_freeze,
    cannot_run_blocks,
    comes_and_goes,
    found_by_blocks,
    install_blocks,
    install_schedule,
    not_asked_for,
    place_of,
    plan_by_blocks,
    rewritten_by,
    rewritten_by_blocks,
    schedule_for,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_bytes


class CheckmatePlan(SchedulePlan):
    """A schedule of the whole model, and what it comes to."""

    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    plain_bytes: Bytes
    """Peak without a schedule."""
    again_s: float
    """Seconds of what runs again in a micro-batch."""


class Checkmate(Technique):
    """Trades op runs for bytes anywhere in the model: what runs again, how often, and what is let go early,
    is one program.

    The model's ops, forward and backward, are joined to a few nodes; Checkmate's program over them is
    relaxed, rounded and improved, or solved exactly. A frozen schedule then takes the place of the model's
    forward and backward.

    Distinguishing test: the measured peak is the schedule's, to the byte, and values are made three times and
    more where that pays.
    """

    kind: Literal["checkmate"] = "checkmate"
    slot: ClassVar[str] = "recompute"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (CheckmatePlan, BudgetBlocksPlan)
    title: ClassVar[str] = "Recompute by an integer program over all ops"
    source: ClassVar[str] = (
        "Jain et al. 2020, Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = SCHEDULED

    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Peak to stay within; less frees more and recomputes more. Left out: all the memory that the target
    gives.
    """
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    """In place of bytes: 0 is the smallest peak that was found, 1 the peak without recomputation."""
    nodes: Annotated[int, Field(ge=4, le=80)] = 16
    """Stretches of ops that are decided on: more decide finer and take longer to solve, 16 about a second."""
    solver: Literal["approx", "exact"] = "approx"
    """`approx`: linear program, rounded; `exact`: then the integer program as well, for up to a minute for
    each budget.
    """

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs a budget that plain training exceeds and a schedule meets, and a model whose ops do not
        depend on its data.
        """
        by_blocks = comes_and_goes(program, target)
        reason = cannot_run_blocks(program, target) if by_blocks else cannot_freeze(program, target)
        if reason is not None:
            return reason
        if self.budget_bytes is not None and self.share is not None:
            return Reason("budget_bytes and share both say what the budget is", "give one of them")
        budget = self.budget_bytes or target.budget_bytes
        if budget is None and self.share is None:
            return Reason(
                "there is no budget to plan for",
                "--max-memory 20GiB, or recompute: {kind: checkmate, share: 0.5}",
            )
        if (
            self.budget_bytes is None
            and self.share is None
            and (reason := not_asked_for(program, target, self.kind))
        ):
            return reason
        if self.share is None and budget is not None:
            place = place_of(program, target)
            if (place.plain_live_bytes if by_blocks else place.plain_bytes) <= budget:
                return Reason("everything fits into the budget as it is", "recompute: {kind: none}")
            if program.ranks > 1 and not by_blocks and (reason := place.below(budget)) is not None:
                return reason
        found = self._found(program, target)
        if isinstance(found, str):
            return Reason(found, "recompute: {kind: planned}")
        if not found.is_within:
            return Reason(
                f"no schedule was found within {format_bytes(found.budget_bytes)}: the smallest needs "
                f"{format_bytes(found.peak_bytes)}",
                "a smaller micro-batch, or sharding or offload of what is not an activation",
            )
        if found.again_s == 0:
            return Reason("nothing could be let go that is worth computing again", "recompute: {kind: none}")
        return None

    def plan(self, program: Program, target: Target) -> CheckmatePlan | BudgetBlocksPlan:
        """What runs when and again, and what is let go after which op, of the model or of each block; and
        what it costs.
        """
        if self.share is None and (self.budget_bytes or target.budget_bytes) is None:
            raise ApplyError(
                "recompute: {kind: checkmate} has no budget to plan for.",
                fix="give budget_bytes or share",
                code="MT316",
            )
        found = self._found(program, target)
        if isinstance(found, str):
            raise ApplyError(f"recompute: {{kind: checkmate}} finds nothing to plan: {found}.", code="MT316")
        if isinstance(found, BlockSchedules):
            return plan_by_blocks(found)
        return CheckmatePlan(
            schedule=found.schedule,
            peak_bytes=found.peak_bytes,
            plain_bytes=found.plain_bytes,
            again_s=round(found.again_s, 9),
        )

    def rewrite(self, program: Program, plan: CheckmatePlan | BudgetBlocksPlan, target: Target) -> Program:
        """The model's ops in the order of the schedule."""
        if isinstance(plan, BudgetBlocksPlan):
            return rewritten_by_blocks(plan, program, self.kind)
        return rewritten_by(plan, program)

    def apply(self, context: Context, plan: CheckmatePlan | BudgetBlocksPlan) -> None:
        """Put the executor of the schedule in the place of the model's forward; the audit asks whether it
        ran.
        """
        if isinstance(plan, BudgetBlocksPlan):
            install_blocks(plan, context, self.kind)
            return
        install_schedule(plan, context, made_by=self.kind)

    def record(self, target: Target) -> dict[str, Any]:
        """The budget, and how it is solved for."""
        budget = self.budget_bytes or target.budget_bytes
        asked: Any = f"share {self.share}" if self.share is not None else budget or "no budget"
        return {"activations.recompute": {"checkmate": asked, "nodes": self.nodes, "solver": self.solver}}

    def _found(self, program: Program, target: Target) -> CheckmateSchedule | BlockSchedules | str:
        budget = None if self.share is not None else self.budget_bytes or target.budget_bytes
        if comes_and_goes(program, target):
            return found_by_blocks(place_of(program, target), self._sources(), budget, self.share or 0.0)
        return schedule_for(place_of(program, target), budget, self.share or 0.0, self.nodes, self._exact_s())

    def _sources(self) -> tuple[Exact]:
        return (Exact(self.nodes, self._exact_s()),)

    def _exact_s(self) -> float:
        return 60.0 if self.solver == "exact" else 0.0
