"""Planned offsets: one step's requests are observed, laid out together, and replayed in every later step."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.memory import ArenaSettings
from memtune.search_spaces.allocator._own_allocator import OwnAllocator
from memtune.technique import Target


class PlannedLayout(OwnAllocator):
    """Brings memory close to the largest live bytes by offsets planned for a whole step, at the cost of one
    planning (a second, once).

    The first step creates the optimizer's state, apart from its other memory, and is not observed. The
    observed step is laid out on a circle, since a step's allocations repeat. A request gets its offset only
    if its size is the planned one and the place is free. Other requests are served by stitched memory, with
    one message, and after
    `replan_after` of them another step is observed. While steps do not follow the plan, memory that no
    planned request uses is returned.

    Offsets are planned while training runs, from the requests of this process: a plan cannot come from
    another setting, and results do not depend on addresses.
    """

    kind: Literal["planned_layout"] = "planned_layout"
    title: ClassVar[str] = "Planned offsets"
    clause: ClassVar[str] = "gives the tensors of a step planned addresses"
    source: ClassVar[str] = "Imanishi and Xu 2024, A Heuristic for Periodic Memory Allocation, ISMM 2024"
    paper: ClassVar[str] = "Imanishi and Xu 2024"

    replan_after: Annotated[int, Field(ge=1)] = 64
    """Unplanned requests before another step is observed: a small value plans often where steps differ, a
    large one keeps an old plan.
    """

    def record(self, target: Target) -> dict[str, Any]:
        return {"allocator": {"planned": dict(self.knobs())}}

    def settings(self) -> ArenaSettings:
        """Return the knob as the allocator takes it."""
        return ArenaSettings(kind=self.kind, planned=True, replan_after=self.replan_after)
