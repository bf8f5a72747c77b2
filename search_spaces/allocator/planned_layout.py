"""Planned offsets: one step's requests are watched, laid out together, and replayed in every later step."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.memory import ArenaSettings
from memtune.search_spaces.allocator._own_allocator import OwnAllocator
from memtune.technique import Target


class PlannedLayout(OwnAllocator):
    """Trades one laid-out step (a second, once) for memory close to the most bytes alive at once.

    The first step makes the optimizer's state and is not watched. What is watched is laid out on a circle,
    since a step's allocations repeat. A request gets its offset only if its size is that of the plan and the
    place is free; any other one is served by stitched memory, with one message, and after `replan_after` of
    them another step is watched. While steps do not follow the plan, the memory that nothing in it uses is
    given back.

    Offsets are decided while training runs, from the requests that this process really makes: no plan from
    elsewhere can be wrong, and results do not depend on addresses.
    """

    kind: Literal["planned_layout"] = "planned_layout"
    title: ClassVar[str] = "Planned offsets"
    source: ClassVar[str] = "Imanishi and Xu 2024, A Heuristic for Periodic Memory Allocation, ISMM 2024"

    replan_after: Annotated[int, Field(ge=1)] = 64
    """Requests off the plan before another step is watched: few plan often where steps differ, many stay on
    an old plan.
    """

    def record(self, target: Target) -> dict[str, Any]:
        """The allocator and its knob."""
        return {"allocator": {"planned": dict(self.knobs())}}

    def settings(self) -> ArenaSettings:
        """The knob as the allocator takes it."""
        return ArenaSettings(kind=self.kind, planned=True, replan_after=self.replan_after)
