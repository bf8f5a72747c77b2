"""Keep or recompute each saved tensor, so that an exact byte budget is met in the least time."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune import refusals
from memtune.effects import DISPATCH_MODE, Effects
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces import active
from memtune.search_spaces._support import conflict
from memtune.search_spaces.recompute._block_planner.budget import (
    Budget,
    Solution,
    later_pass_inputs,
    later_techniques,
    plain_bytes,
    solve_budget,
)
from memtune.search_spaces.recompute._block_planner.claims import (
    PlannedPlan,
    PricedEntry,
    claim_planned,
    explain_planned,
    option_fields,
    rewrite_planned,
)
from memtune.search_spaces.recompute._block_planner.fits import cannot_recompute
from memtune.search_spaces.recompute._schedule_planner.region_placement import (
    cannot_schedule_model,
    needs_own_budget,
    placement_of,
    schedules_nothing,
)
from memtune.search_spaces.recompute._schedule_planner.schedule_search import (
    NOT_FASTER,
    BudgetSchedulePlan,
    FastestSchedule,
    explain_schedule,
    fastest_schedule,
    install_schedule,
    rewrite_by_schedule,
    sufficient_bytes,
    to_schedule_plan,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_budget, format_bytes

_Plans = PlannedPlan | BudgetSchedulePlan


class Planned(Technique):
    """Adds only the recomputation that a byte budget requires: the tensors that are cheapest to recompute per
    byte go first.

    Every combination of keeping and recomputing a block's saved tensors is priced on the recorded step. Then
    one is chosen for every block so that the peak of the whole program, sharding and offload included, stays
    within the budget. Equal blocks get different choices only where one choice for all of them would be
    slower or too large.
    """

    kind: Literal["planned"] = "planned"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (PlannedPlan, BudgetSchedulePlan)
    title: ClassVar[str] = "Keep or recompute each saved tensor, by budget"
    source: ClassVar[str] = (
        "memtune; on min-cut rematerialization (He and Yu 2023, PyTorch's partitioner), Checkmate (Jain et"
        " al. 2020, arXiv:1910.02653) and TSPLIT (Nie et al., ICDE 2022)"
    )
    paper: ClassVar[str] = "memtune"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    by_budget: ClassVar[bool] = True

    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Largest peak allowed; less frees more and recomputes more. Default: the target's memory."""
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Instead of bytes: 0 is the smallest peak that recomputation can reach, 1 the peak without any."""

    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Fraction of a byte budget that is left free for memory that no recording shows, such as a kernel's
    workspace; more is safer.
    """
    offload: bool = True
    """Tensors may be offloaded to host memory where that is faster than to recompute them. False is required
    with a technique of `offload.activations`, which then offloads what is kept.
    """

    by_schedule: bool | None = None
    """A schedule of single ops replaces the plan where it is faster within the same budget; not where
    parameters, gradients or activations are moved at a block's own calls. Every step must run the same ops.
    Default: where nothing speaks against it and the plan's hooks take a noticeable part of the step.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        how = "op by op" if self.by_schedule else "cheapest first"
        return (
            f"recomputes as few activations as needed {format_budget(self.budget_bytes, self.share)}, {how}"
        )

    @property
    def effects(self) -> Effects:
        # A schedule may replace the plan.
        return Effects(
            calls="schedule" if self.by_schedule else "plain", activations="model", eager_only=DISPATCH_MODE
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse a budget that plain training meets or no plan meets, and blocks that cannot run again."""
        reason = cannot_recompute(program.step, target.compiled)
        if reason is not None:
            return reason
        if self.budget_bytes is not None and self.share is not None:
            return refusals.two_budgets()
        if self._budget(target) is None:
            return refusals.no_budget("--max-memory 20GiB, or recompute: {kind: planned, share: 0.5}")
        if (reason := self._moved_by_another(program, target)) is not None:
            return reason
        if self.by_schedule:
            asked = self.budget_bytes is not None or self.share is not None
            reason = None if asked else needs_own_budget(target, self.kind)
            if (reason := reason or cannot_schedule_model(program, target)) is not None:
                return reason
        # Before the solver, which takes much longer.
        if self._fits_as_it_is(program, target):
            return refusals.fits_already("recompute: {kind: none}")
        solution = self._solution(program, target)
        if self.by_schedule:
            scheduled = self._scheduled(program, target, solution)
            return (
                scheduled
                if isinstance(scheduled, Reason)
                else self._too_little(program, target, solution, scheduled)
            )
        if not solution.is_within:
            return Reason(
                f"no plan stays within {format_bytes(solution.budget_bytes)}{self._headroom_note()}: the"
                f" smallest needs {format_bytes(solution.smallest_bytes)}",
                "a smaller micro-batch, or sharding or offload of states",
            )
        return None

    def _moved_by_another(self, program: Program, target: Target) -> Reason | None:
        """Return why another technique may not offload what is kept."""
        if active(target, "offload.activations") is not None and program.stages is not None:
            return Reason(
                "offload on the stages of a pipeline is not planned for", "offload.activations: {kind: none}"
            )
        return conflict(self, target, "offload.states", "offload.activations")

    def _fits_as_it_is(self, program: Program, target: Target) -> bool:
        """Return True if the plain program meets the budget; nothing is solved for it."""
        budget = self._budget(target)
        if budget is None or budget.n_bytes is None:
            return False
        return (
            plain_bytes(program, later_techniques(target), target.hardware, later_pass_inputs(target))
            <= budget.n_bytes
        )

    def plan(self, program: Program, target: Target) -> _Plans:
        if self._budget(target) is None:
            raise refusals.no_budget_to_plan(self)
        solution = self._solution(program, target)
        if self.by_schedule:
            scheduled = self._scheduled(program, target, solution)
        else:
            scheduled = self._instead_of_hooks(program, target, solution)
        if isinstance(scheduled, FastestSchedule):
            return to_schedule_plan(scheduled, solution.budget_bytes, solution.plain_bytes)
        return _plan(solution)

    def rewrite(self, program: Program, plan: _Plans, target: Target) -> Program:
        """Return the program with blocks recomputed as planned, under a schedule op by op."""
        if isinstance(plan, BudgetSchedulePlan):
            return rewrite_by_schedule(plan, program)
        return rewrite_planned(program, plan)

    def apply(self, context: Context, plan: _Plans) -> None:
        """Claim recomputed blocks with the calls that do not run again, or install the schedule."""
        if isinstance(plan, BudgetSchedulePlan):
            install_schedule(plan, context)
            return
        claim_planned(context, plan)

    def explain(self, plan: _Plans) -> tuple[str, ...]:
        return (
            explain_schedule(plan) if isinstance(plan, BudgetSchedulePlan) else tuple(explain_planned(plan))
        )

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"by_schedule": (None, True)}

    def record(self, target: Target) -> dict[str, Any]:
        budget = self._budget(target)
        what = {"planned": "no budget" if budget is None else budget.n_bytes or f"share {budget.share}"}
        return {"activations.recompute": {**what, **({"by_schedule": True} if self.by_schedule else {})}}

    def _budget(self, target: Target) -> Budget | None:
        if self.share is not None:
            return Budget(share=self.share, host=self.offload)
        n_bytes = self.budget_bytes or target.budget_bytes
        return None if n_bytes is None else Budget(int(n_bytes * (1 - self.headroom)), host=self.offload)

    def _headroom_note(self) -> str:
        return (
            ""
            if self.share is not None or not self.headroom
            else f" ({self.headroom:.3g} of the budget is headroom)"
        )

    def _too_little(
        self, program: Program, target: Target, solution: Solution, found: FastestSchedule | None
    ) -> Reason | None:
        """Return why neither `found` nor the plan by blocks meets the budget; None if `found` does."""
        # A sufficient budget is computed only if a config gave `budget_bytes`; a search tries many budgets.
        if found is not None:
            return None
        why = f"no schedule stays within {format_bytes(solution.budget_bytes)}{self._headroom_note()}"
        least = solution.smallest_bytes
        if self.budget_bytes is None:
            return Reason(why, "a larger budget")
        enough = sufficient_bytes(placement_of(program, target), solution.budget_bytes, least)
        if enough is not None:
            return Reason(
                f"{why}; {format_bytes(enough)} are enough", f"budget_bytes: {self._with_headroom(enough)}"
            )
        fix = f"by_schedule: false, budget_bytes: {self._with_headroom(least)}"
        return Reason(f"{why}; the smallest plan by blocks needs {format_bytes(least)}", fix)

    def _with_headroom(self, n_bytes: int) -> int:
        """Return the smallest `budget_bytes` of which `n_bytes` are left after the headroom."""
        with_headroom = int(n_bytes / (1 - self.headroom))
        # Both divisions round down, which may lose a byte.
        while int(with_headroom * (1 - self.headroom)) < n_bytes:
            with_headroom += 1
        return with_headroom

    def _scheduled(
        self, program: Program, target: Target, solution: Solution
    ) -> FastestSchedule | Reason | None:
        """Return a schedule faster than the plan by blocks, or within a budget it misses; else why not."""
        # A schedule slower than a plan within the budget is of no use, so the search for one may stop there.
        below_s = solution.seconds if solution.is_within else math.inf
        found = fastest_schedule(program, target, solution.budget_bytes, below_s, swaps=self.offload)
        if solution.is_within and (
            found is None or (isinstance(found, FastestSchedule) and found.seconds >= solution.seconds)
        ):
            return NOT_FASTER
        return found

    def _instead_of_hooks(
        self, program: Program, target: Target, solution: Solution
    ) -> FastestSchedule | None:
        """Return a schedule of the model that is faster than the plan, if the plan's hooks cost enough."""
        if self.by_schedule is False or not solution.is_within or not solution.has_costly_claims:
            return None
        if active(target, "execution.order") is not None and self.budget_bytes is None and self.share is None:
            return None  # as in `fits`: a search would solve for each micro-batch again
        others = tuple(slot for slot in target.chosen if slot != self.slot)
        if schedules_nothing(target, *others) is not None:
            return None
        found = fastest_schedule(program, target, solution.budget_bytes, solution.seconds)
        return found if isinstance(found, FastestSchedule) and found.seconds < solution.seconds else None

    def _solution(self, program: Program, target: Target) -> Solution:
        budget = self._budget(target)
        assert budget is not None  # checked by `fits` and `plan`
        return solve_budget(program, budget, target)


def _plan(solution: Solution) -> PlannedPlan:
    levels = solution.levels
    chosen = levels.chosen(solution.choice)
    different = list(dict.fromkeys(chosen))
    entries = []
    for option in different:
        place = next(place for place, block in enumerate(levels.order.tolist()) if chosen[block] == option)
        row = int(solution.choice[0 if levels.uniform else place])
        entries.append(
            PricedEntry(
                **option_fields(option),
                held_bytes=int(levels.held_bytes[place, row]),
                plain_bytes=int(levels.held_bytes[place, 0]),
                seconds=round(float(levels.seconds[place, row]), 9),
            )
        )
    return PlannedPlan(
        options=tuple(entries),
        blocks=tuple(different.index(option) for option in chosen),
        budget_bytes=solution.budget_bytes,
        peak_bytes=solution.peak_bytes,
        smallest_bytes=solution.smallest_bytes,
        plain_bytes=solution.plain_bytes,
    )
