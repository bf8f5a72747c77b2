"""Blocks in stages, one after the other on several ranks, with micro-batches on their way through them (pipeline parallelism)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.runtime.context import Context
from memtune.runtime.pipeline import Layout, pipe
from memtune.technique import Exactness, Plan, Technique


class Pipeline(Technique):
    """x"""

    kind: Literal["pipeline"] = "pipeline"
    slot: ClassVar[str] = "sharding.parallel"
    title: ClassVar[str] = "Blocks in stages on several ranks"
    source: ClassVar[str] = "x"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    degree: Annotated[int, Field(ge=2)] | None = None
    schedule: Literal["1f1b", "interleaved_1f1b", "gpipe"] = "1f1b"

    def apply(self, context: Context, plan: Plan) -> None:
        d = plan.decisions
        pipe(context, Layout(tuple(map(tuple, d["stages"])), frozenset(d["first"]), frozenset(d["last"]), self.degree or context.ranks, self.schedule))
