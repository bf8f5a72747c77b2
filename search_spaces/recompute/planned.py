"""Decide for every saved tensor whether to keep it or run it again, so that an exact byte budget is met in
the least time.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.effects import DISPATCH_MODE, Effects
from memtune.errors import ApplyError
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces._support import active, conflict
from memtune.search_spaces.recompute._block_planner import (
    Budget,
    PlannedPlan,
    PricedEntry,
    Solution,
    as_planned,
    claim_planned,
    explained,
    fields_of,
    later_techniques,
    packs_of,
    plain_bytes,
    told_later,
    why_not,
    within,
)
from memtune.search_spaces.recompute._schedule_planner import (
    NOT_FASTER,
    BlockSchedules,
    BudgetBlocksPlan,
    BudgetSchedulePlan,
    FastestSchedule,
    cannot_freeze,
    cannot_run_blocks,
    comes_and_goes,
    enough_bytes,
    explained_blocks,
    explained_schedule,
    fastest_by_blocks,
    fastest_schedule,
    install_blocks,
    install_schedule,
    not_asked_for,
    place_of,
    plan_by_blocks,
    plan_of,
    rewritten_by,
    rewritten_by_blocks,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_bytes

_Plans = PlannedPlan | BudgetSchedulePlan | BudgetBlocksPlan


class Planned(Technique):
    """Trades just as much time as the budget asks for: what is cheapest to have again per byte goes first.

    Every combination of keeping and recomputing a block's saved tensors is priced on the recorded step, then
    one is chosen for every block so that the peak of the whole program, sharding and offload included, stays
    within the budget. Blocks that are alike differ only where one choice for all of them would be slower or
    too large.

    Distinguishing test: the measured peak is the one that was planned, within the budget and no further below
    it than one tensor; no other recompute technique is faster at the same peak.
    """

    kind: Literal["planned"] = "planned"
    slot: ClassVar[str] = "recompute"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (PlannedPlan, BudgetSchedulePlan, BudgetBlocksPlan)
    title: ClassVar[str] = "Keep or recompute each saved tensor, by budget"
    source: ClassVar[str] = (
        "memtune; on min-cut rematerialization (He and Yu 2023, PyTorch's partitioner), Checkmate (Jain et"
        " al. 2020, arXiv:1910.02653) and TSPLIT (Nie et al., ICDE 2022)"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    budget_bytes: Annotated[int, Field(gt=0)] | None = None
    """Peak to stay within; less frees more and recomputes more. Left out: all the memory that the target
    gives.
    """
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    """In place of bytes: 0 is the smallest peak that recomputation can reach, 1 the peak without any."""

    spare: Annotated[float, Field(ge=0, lt=1)] = 0.01
    """Part of a budget in bytes that stays free for what no recording shows, such as a kernel's scratch; more
    is safer.
    """
    host: bool = True
    """Tensors may go to host memory where that is faster than to run them again; False keeps to
    recomputation, as it must beside a technique of `offload.activations`, which then moves what is kept.
    """

    by_schedule: bool = False
    """Where frozen schedules are faster within the same budget, they take the plan's place: one of all ops,
    or where ranks divide parameters one for each block; they need ops that are the same in every step.
    """

    @property
    def effects(self) -> Effects:
        """Of a schedule, where one may take the plan's place."""
        return Effects(
            calls="schedule" if self.by_schedule else "plain", activations="block", eager_only=DISPATCH_MODE
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs a budget that plain training exceeds and that some plan meets, and blocks that can run
        again.
        """
        reason = why_not(program.step, target.compiled)
        if reason is not None:
            return reason
        if self.budget_bytes is not None and self.share is not None:
            return Reason("budget_bytes and share both say what the budget is", "give one of them")
        if self._budget(target) is None:
            return Reason(
                "there is no budget to plan for",
                "--max-memory 20GiB, or recompute: {kind: planned, share: 0.5}",
            )
        if (reason := self._moved_by_another(program, target)) is not None:
            return reason
        asked = self.budget_bytes is not None or self.share is not None
        if (
            not asked
            and (self.by_schedule or packs_of(target))
            and (reason := not_asked_for(program, target, self.kind))
        ):
            return reason
        if self.by_schedule and (reason := self._cannot_schedule(program, target)) is not None:
            return reason
        if self._fits_as_it_is(program, target):
            return Reason("everything fits into the budget as it is", "recompute: {kind: none}")
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
                f"no plan stays within {format_bytes(solution.budget_bytes)}{self._spared()}: the smallest"
                f" needs {format_bytes(solution.smallest_bytes)}",
                "a smaller micro-batch, or sharding or offload of what is not an activation",
            )
        return None

    def _moved_by_another(self, program: Program, target: Target) -> Reason | None:
        """Why another technique may not move what is kept."""
        if active(target, "offload.activations") is not None and program.stages is not None:
            return Reason(
                "what moves on the stages of a pipeline is not planned for",
                "offload.activations: {kind: none}",
            )
        return conflict(self, target, "offload.activations")

    def _cannot_schedule(self, program: Program, target: Target) -> Reason | None:
        return (
            cannot_run_blocks(program, target)
            if comes_and_goes(program, target)
            else cannot_freeze(program, target)
        )

    def _fits_as_it_is(self, program: Program, target: Target) -> bool:
        """Whether nothing has to be planned for; known before anything is solved."""
        budget = self._budget(target)
        if budget is None or budget.n_bytes is None:
            return False
        return (
            plain_bytes(program, later_techniques(target), target.hardware, told_later(target))
            <= budget.n_bytes
        )

    def plan(self, program: Program, target: Target) -> _Plans:
        """What each block keeps and runs again, with what that costs and frees."""
        if self._budget(target) is None:
            raise ApplyError(
                "recompute: {kind: planned} has no budget to plan for.",
                fix="give budget_bytes or share",
                code="MT316",
            )
        solution = self._solution(program, target)
        scheduled = self._scheduled(program, target, solution) if self.by_schedule else None
        if isinstance(scheduled, BlockSchedules) and scheduled.is_within:
            return plan_by_blocks(scheduled)
        if isinstance(scheduled, FastestSchedule):
            return plan_of(scheduled, solution.budget_bytes, solution.plain_bytes)
        return _plan(solution)

    def rewrite(self, program: Program, plan: _Plans, target: Target) -> Program:
        """Every block runs again in backward as far as the plan says; under a schedule, single ops."""
        if isinstance(plan, BudgetSchedulePlan):
            return rewritten_by(plan, program)
        if isinstance(plan, BudgetBlocksPlan):
            return rewritten_by_blocks(plan, program, self.kind)
        return as_planned(program, plan)

    def apply(self, context: Context, plan: _Plans) -> None:
        """Claim the blocks that run again in the activation table, with the calls that do not; or run by the
        schedule.
        """
        if isinstance(plan, BudgetSchedulePlan):
            install_schedule(plan, context)
            return
        if isinstance(plan, BudgetBlocksPlan):
            install_blocks(plan, context, self.kind)
            return
        claim_planned(context, plan)

    def explain(self, plan: _Plans) -> tuple[str, ...]:
        """The peak, then for each run of blocks what is kept, run again and moved, what that frees and what
        it costs.
        """
        if isinstance(plan, BudgetBlocksPlan):
            return explained_blocks(plan)
        return explained_schedule(plan) if isinstance(plan, BudgetSchedulePlan) else tuple(explained(plan))

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """By blocks, and by a schedule where that is faster."""
        return {"by_schedule": (False, True)}

    def record(self, target: Target) -> dict[str, Any]:
        """The budget that decides all else."""
        budget = self._budget(target)
        what = {"planned": "no budget" if budget is None else budget.n_bytes or f"share {budget.share}"}
        return {"activations.recompute": {**what, **({"by_schedule": True} if self.by_schedule else {})}}

    def _budget(self, target: Target) -> Budget | None:
        host = self.host and packs_of(target) is None  # what a pack saves is used at once
        if self.share is not None:
            return Budget(share=self.share, host=host)
        n_bytes = self.budget_bytes or target.budget_bytes
        return None if n_bytes is None else Budget(int(n_bytes * (1 - self.spare)), host=host)

    def _spared(self) -> str:
        return (
            "" if self.share is not None or not self.spare else f" ({self.spare:.3g} of the budget is spare)"
        )

    def _too_little(
        self,
        program: Program,
        target: Target,
        solution: Solution,
        found: FastestSchedule | BlockSchedules | None,
    ) -> Reason | None:
        """Why neither `found` nor the plan by blocks is within the budget, with one that is enough; None
        where `found` is.

        What would be enough is looked for where a config asks for these bytes; a search asks of many.
        """
        if isinstance(found, FastestSchedule) or (found is not None and found.is_within):
            return None
        why, least = (
            f"no schedule stays within {format_bytes(solution.budget_bytes)}{self._spared()}",
            solution.smallest_bytes,
        )
        if self.budget_bytes is None:
            return Reason(why, "a larger budget")
        if found is None:
            enough = enough_bytes(place_of(program, target), solution.budget_bytes, least)
        else:
            enough = found.smallest_bytes if found.smallest_bytes < least else None
        if enough is not None:
            return Reason(
                f"{why}; {format_bytes(enough)} are enough", f"budget_bytes: {self._with_spare(enough)}"
            )
        fix = f"by_schedule: false, budget_bytes: {self._with_spare(least)}"
        return Reason(f"{why}; the smallest plan by blocks needs {format_bytes(least)}", fix)

    def _with_spare(self, n_bytes: int) -> int:
        """The `budget_bytes` of which all but what is spare is `n_bytes`."""
        with_spare = int(n_bytes / (1 - self.spare))
        while int(with_spare * (1 - self.spare)) < n_bytes:
            with_spare += 1
        return with_spare

    def _scheduled(
        self, program: Program, target: Target, solution: Solution
    ) -> FastestSchedule | BlockSchedules | Reason | None:
        """Schedules that are faster than the plan by blocks, or meet a budget that no such plan does; else
        why not.

        Where neither is within the budget, None, or of blocks the smallest ones.
        """
        if comes_and_goes(program, target):
            return fastest_by_blocks(program, target, solution)
        found = fastest_schedule(program, target, solution.budget_bytes)
        if solution.is_within and (
            found is None or (isinstance(found, FastestSchedule) and found.seconds >= solution.seconds)
        ):
            return NOT_FASTER
        return found

    def _solution(self, program: Program, target: Target) -> Solution:
        budget = self._budget(target)
        assert budget is not None  # fits and plan have checked
        return within(program, budget, target)


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
                **fields_of(option),
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
