"""Planned offsets: one step's requests are watched, laid out together, and replayed in every later step."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.arena_settings import VARIABLE, ArenaSettings
from memtune.program import Program
from memtune.runtime import arena
from memtune.runtime.context import Context
from memtune.search_spaces.allocator import why_no_arena
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class PlannedLayout(Technique):
    """Trades one laid-out step (a second, once) for memory close to the most bytes alive at once.

    The first step makes the optimizer's state and is not watched. What is watched is laid out on a circle, since a step's
    allocations repeat. A request gets its offset only if its size is that of the plan and the place is free; any other one is
    served by stitched memory, with one message, and after `replan_after` of them another step is watched.

    Offsets are decided while training runs, from the requests that this process really makes: no plan from elsewhere can be
    wrong, and results do not depend on addresses.
    """

    kind: Literal["planned_layout"] = "planned_layout"
    slot: ClassVar[str] = "allocator"
    title: ClassVar[str] = "Planned offsets"
    source: ClassVar[str] = "Imanishi and Xu 2024, A Heuristic for Periodic Memory Allocation, ISMM 2024"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    replan_after: Annotated[int, Field(ge=1)] = 64
    """Requests off the plan before another step is watched: few plan often where steps differ, many stay on an old plan."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Not where something else must own the memory, and not on GPUs yet."""
        return why_no_arena(target)

    def env(self) -> dict[str, str]:
        """Which allocator, with which knobs; read by the simulator, and by whoever starts the process."""
        return {VARIABLE: self.settings().text()}

    def apply(self, context: Context, plan: Plan) -> None:
        """Storages come from the arena from now on; steps end where the optimizer's do."""
        arena.use(context, self.settings())

    def record(self, target: Target) -> dict[str, Any]:
        """The allocator and its knob."""
        return {"allocator": {"planned": dict(self.knobs())}}

    def settings(self) -> ArenaSettings:
        """The knob as the allocator takes it."""
        return ArenaSettings(kind=self.kind, planned=True, replan_after=self.replan_after)
