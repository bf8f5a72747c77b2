"""Recompute any op, as often as it pays, by an integer program over the step (Jain et al. 2020)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune import refusals
from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes
from memtune.search_spaces.recompute._schedule_planner.checkmate_schedule import (
    CheckmateSchedule,
    schedule_for,
)
from memtune.search_spaces.recompute._schedule_planner.region_placement import (
    MODEL_SCHEDULED,
    SchedulePlan,
    cannot_schedule_model,
    needs_own_budget,
    placement_of,
)
from memtune.search_spaces.recompute._schedule_planner.schedule_search import (
    install_schedule,
    rewrite_by_schedule,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_budget, format_bytes


class CheckmatePlan(SchedulePlan):
    """A schedule of the whole model with its peak and time."""

    peak_bytes: Bytes
    """Peak of the whole program after every later pass."""
    plain_bytes: Bytes
    """Peak without a schedule."""
    recompute_s: float
    """Seconds of recomputation in a micro-batch."""


class Checkmate(Technique):
    """Recomputes single ops anywhere in the model within a byte budget: one integer program decides what runs
    again, how often, and what is freed early.

    The model's ops, forward and backward, are joined to a few nodes. Checkmate's program over them is
    relaxed, rounded and improved, or solved exactly. The resulting schedule replaces the model's forward and
    backward.
    """

    kind: Literal["checkmate"] = "checkmate"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (CheckmatePlan,)
    title: ClassVar[str] = "Recompute by an integer program over all ops"
    source: ClassVar[str] = (
        "Jain et al. 2020, Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys"
    )
    paper: ClassVar[str] = "Checkmate"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    by_budget: ClassVar[bool] = True
    effects: ClassVar[Effects] = MODEL_SCHEDULED

    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Largest peak allowed; less frees more and recomputes more. Default: the target's memory."""
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Instead of bytes: 0 is the smallest peak found, 1 the peak without recomputation."""
    nodes: Annotated[int, Field(ge=4, le=80)] = 16
    """Stretches of ops to decide on: more decide in finer steps and take longer to solve, 16 about a second.
    """
    solver: Literal["approx", "exact"] = "approx"
    """`approx`: linear program, rounded; `exact`: also the integer program, for up to a minute per budget."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return f"recomputes single ops by a solved schedule, {format_budget(self.budget_bytes, self.share)}"

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse a budget met by plain training or no schedule, and models with data-dependent ops."""
        if (reason := cannot_schedule_model(program, target)) is not None:
            return reason
        if self.budget_bytes is not None and self.share is not None:
            return refusals.two_budgets()
        budget = self.budget_bytes or target.budget_bytes
        if budget is None and self.share is None:
            return refusals.no_budget("--max-memory 20GiB, or recompute: {kind: checkmate, share: 0.5}")
        if (
            self.budget_bytes is None
            and self.share is None
            and (reason := needs_own_budget(target, self.kind))
        ):
            return reason
        if self.share is None and budget is not None:
            place = placement_of(program, target)
            if place.plain_bytes <= budget:
                return refusals.fits_already("recompute: {kind: none}")
            if (reason := place.reason_below(budget)) is not None:
                return reason
        found = self._found(program, target)
        if isinstance(found, str):
            return Reason(found, "recompute: {kind: planned}")
        if not found.is_within:
            return Reason(
                f"no schedule was found within {format_bytes(found.budget_bytes)}: the smallest needs "
                f"{format_bytes(found.peak_bytes)}",
                "a smaller micro-batch, or sharding or offload of states",
            )
        if found.recompute_s == 0:
            return refusals.nothing_worth_recompute()
        return None

    def plan(self, program: Program, target: Target) -> CheckmatePlan:
        if self.share is None and (self.budget_bytes or target.budget_bytes) is None:
            raise refusals.no_budget_to_plan(self)
        found = self._found(program, target)
        if isinstance(found, str):
            raise ApplyError(f"recompute: {{kind: checkmate}} finds nothing to plan: {found}.", code="MT316")
        return CheckmatePlan(
            schedule=found.schedule,
            peak_bytes=found.peak_bytes,
            plain_bytes=found.plain_bytes,
            recompute_s=round(found.recompute_s, 9),
        )

    def rewrite(self, program: Program, plan: CheckmatePlan, target: Target) -> Program:
        """Return the program with the model's ops in the order of the schedule."""
        return rewrite_by_schedule(plan, program)

    def apply(self, context: Context, plan: CheckmatePlan) -> None:
        """Replace the model's forward by the executor of the schedule, and add an audit check that it ran."""
        install_schedule(plan, context, made_by=self.kind)

    def record(self, target: Target) -> dict[str, Any]:
        budget = self.budget_bytes or target.budget_bytes
        asked: Any = f"share {self.share}" if self.share is not None else budget or "no budget"
        return {"activations.recompute": {"checkmate": asked, "nodes": self.nodes, "solver": self.solver}}

    def _found(self, program: Program, target: Target) -> CheckmateSchedule | str:
        budget = None if self.share is not None else self.budget_bytes or target.budget_bytes
        exact_s = 60.0 if self.solver == "exact" else 0.0
        return schedule_for(placement_of(program, target), budget, self.share or 0.0, self.nodes, exact_s)
