"""MegTaiChi: DTR with a score that also looks at addresses, so that what goes leaves large holes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from memtune.activations.eviction import MEGTAICHI, Policy
from memtune.search_spaces.recompute._schedule_planner import NOT_THE_POLICYS, DynamicPolicy
from memtune.technique import Exactness


class Megtaichi(DynamicPolicy):
    """Trades second runs of ops for bytes in an arena, counting the free bytes beside a tensor as its own.

    The budget is one arena with addresses on the policy's books; what was brought back often is spared a
    little. What the policy did on the recorded step is frozen into a schedule. A tensor that is missing may
    be made and read part by part.

    Distinguishing test: of two tensors alike, the one beside a hole goes.
    """

    kind: Literal["megtaichi"] = "megtaichi"
    slot: ClassVar[str] = "recompute"
    title: ClassVar[str] = "Evict by cost and address (MegTaiChi)"
    source: ClassVar[str] = "Hu et al. 2022, MegTaiChi, ICS; the score as in MegEngine"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    foresight: bool = False
    """Age is the time until the next use, as the recorded step shows it (the paper's access pattern), not
    that since the last.
    """
    parts: Annotated[int, Field(ge=1, le=64)] = 4
    """Where room is short, an element-wise op and those that make what it misses run together in so many
    parts, so that what is made again in between never exists whole (the paper's tensor partition); 1: never.
    Only ops that make the same bits in parts: on a GPU all that work by elements, on CPU not those with an
    exponential.
    """
    cost_power: Annotated[float, Field(ge=0)] = 1.0
    """Power of the cost in the score."""
    size_power: Annotated[float, Field(ge=0)] = 1.0
    """Power of the bytes, those of neighbouring holes included."""
    time_power: Annotated[float, Field(ge=0)] = 1.0
    """Power of the age."""
    replay_base: Annotated[float, Field(ge=1)] = 1.0001
    """A score grows by this factor with every run again."""

    def policy(self) -> Policy:
        """MegEngine's score with the chosen powers."""
        return replace(
            MEGTAICHI, **{name: value for name, value in self.knobs() if name not in NOT_THE_POLICYS}
        )
