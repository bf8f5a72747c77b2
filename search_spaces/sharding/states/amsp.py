"""Each state sharded by its own factor, chosen for the least traffic that memory allows (AMSP)."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from memtune import refusals
from memtune.errors import ApplyError
from memtune.hardware import Hardware
from memtune.parallel.sharding import Factors, Schedule, all_factors, cheapest, held_bytes
from memtune.program import Program, Step
from memtune.search_spaces.sharding.states._nested import _NestedSharding, schedule_of, whole_bytes
from memtune.technique import Exactness, Plan, Reason, Target
from memtune.units import format_ranks

_NONE = Factors(1, 1, 1)


class AmspPlan(Plan):
    """Factor of each state, if the config gives none."""

    parameters: Annotated[int, Field(ge=1)] | None = None
    """Ranks over which parameters are sharded."""
    gradients: Annotated[int, Field(ge=1)] | None = None
    """Ranks over which sums of gradients are sharded."""
    optimizer: Annotated[int, Field(ge=1)] | None = None
    """Ranks over which optimizer state is sharded."""

    @model_validator(mode="after")
    def _says_all(self) -> Self:
        if len({each is None for each in (self.parameters, self.gradients, self.optimizer)}) > 1:
            raise ValueError("parameters, gradients and optimizer are given together")
        return self

    def factors(self) -> Factors | None:
        """Return the three factors, None if the plan is empty."""
        if self.parameters is None or self.gradients is None or self.optimizer is None:
            return None
        return Factors(self.parameters, self.gradients, self.optimizer)


class Amsp(_NestedSharding):
    """Trades bytes for traffic state by state: any factors that divide one another, and the ranks.

    Without factors the plan chooses them: of all that fit into the budget, with the step's other bytes, those
    with the least time on the links by `memtune.parallel.sharding.factors`. With factors any division can be
    configured by hand. Gradients may also be unsharded with sharded parameters, until the last micro-batch.

    Reordered: as `paro`, at most (N + a + 1)·eps·Σ|gᵣ|/N in addition to the rounding of the per-sample sums.
    """

    kind: Literal["amsp"] = "amsp"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (AmspPlan,)
    title: ClassVar[str] = "States divided over factors of their own"
    source: ClassVar[str] = "Chen et al. 2023, AMSP, arXiv:2311.00257, section 4"
    paper: ClassVar[str] = "AMSP"
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    parameters: Annotated[int, Field(ge=1)] | None = None
    """Ranks over which parameters are sharded."""
    gradients: Annotated[int, Field(ge=1)] | None = None
    """Ranks over which sums of gradients are sharded: 1, or a multiple of `parameters`."""
    optimizer: Annotated[int, Field(ge=1)] | None = None
    """Ranks over which optimizer state is sharded: a multiple of the other two."""

    def sentence(self) -> str:
        """Return the setting as one clause."""

        def over(n: int | None) -> str:
            return "as many ranks as planned" if n is None else format_ranks(n)

        factors = (self.parameters, self.gradients, self.optimizer)
        if len(set(factors)) == 1:
            return f"divides weights, gradients and optimizer state over {over(self.parameters)}"
        weights, gradients, optimizer = map(over, factors)
        return f"divides weights over {weights}, gradients over {gradients}, optimizer state over {optimizer}"

    def _given(self) -> Factors | None:
        if self.parameters is None or self.gradients is None or self.optimizer is None:
            return None
        return Factors(self.parameters, self.gradients, self.optimizer)

    def _factors(self, ranks: int, plan: AmspPlan) -> Factors:
        found = self._given() or plan.factors()
        if found is None:
            raise ApplyError(
                "amsp has no factors to shard the model by.",
                fix="parameters: 1, gradients: 1, optimizer: 8",
                code="MT340",
            )
        return found

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require two ranks, all three factors or none, and a division that no other technique makes."""
        if target.ranks < 2:
            return refusals.one_rank(" to divide over")
        asked = [self.parameters, self.gradients, self.optimizer]
        if None in asked and any(asked):
            return Reason(
                "some factors are given but not all", "parameters, gradients and optimizer, or none of them"
            )
        factors = self._given() or _chosen(
            program.step, self._schedule(program, target), target.hardware, target.budget_bytes
        )
        return self._why_not(factors, program, target)

    def _schedule(self, program: Program, target: Target) -> Schedule:
        return schedule_of(program, target, gathers=1 + self.reshard_after_forward)

    def plan(self, program: Program, target: Target) -> AmspPlan:
        if self._given() is not None:
            return AmspPlan()
        schedule = self._schedule(program, target)
        return AmspPlan(**_chosen(program.step, schedule, target.hardware, target.budget_bytes).document())

    def explain(self, plan: AmspPlan) -> tuple[str, ...]:
        return tuple(f"{state} over {over} ranks" for state, over in plan.document().items())

    def record(self, target: Target) -> dict[str, Any]:
        given = self._given()
        factors: dict[str, Any] = (
            given.document() if given is not None else dict.fromkeys(_NONE.document(), "planned")
        )
        return self._divided_settings(factors, given is None or given.parameters > 1)


@lru_cache(maxsize=64)
def _chosen(step: Step, schedule: Schedule, hardware: Hardware, budget_bytes: int | None) -> Factors:
    state_bytes = whole_bytes(step)
    # No factor changes the bytes of the step that are no states.
    other_bytes = step.peak_bytes() - held_bytes(_NONE, state_bytes).total
    limit = float("inf") if budget_bytes is None else budget_bytes - max(other_bytes, 0.0)
    # With one micro-batch a step there are no sums of gradients to shard by a factor of their own.
    among = [
        each
        for each in all_factors(schedule.ranks)
        if schedule.micro_batches > 1 or each.gradients == each.parameters
    ]
    best = cheapest(state_bytes, schedule, hardware, limit_bytes=limit, among=among)
    # Nothing fits: the division that needs least.
    return best or Factors(schedule.ranks, schedule.ranks, schedule.ranks)
