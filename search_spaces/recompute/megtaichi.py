"""MegTaiChi: DTR with a score that includes addresses, so that evictions leave large holes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from memtune.activations.eviction import MEGTAICHI, Policy, megtaichi_options
from memtune.search_spaces.recompute._schedule_planner.frozen_policy import BUDGET_KNOBS, DynamicPolicy
from memtune.technique import Exactness
from memtune.units import format_budget


class Megtaichi(DynamicPolicy):
    """Recomputes single ops to stay within an arena; a tensor's score includes the free bytes next to it.

    The budget is one simulated arena with addresses; tensors that were recomputed often are evicted less
    readily. The policy's decisions on the recorded step become a schedule. An evicted tensor may be
    recomputed and read part by part. Near thrashing the score misleads, so alternatives are played too (cost
    of the evicted ancestors alone, no age, recomputed tensors dropped after their reader), and the one that
    recomputes least decides. An evicted tensor is swapped to the host instead where that costs less time.
    """

    kind: Literal["megtaichi"] = "megtaichi"
    title: ClassVar[str] = "Evict by cost and address (MegTaiChi)"
    source: ClassVar[str] = "Hu et al. 2022, MegTaiChi, ICS; the score as in MegEngine"
    paper: ClassVar[str] = "MegTaiChi"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    foresight: bool = False
    """Age is the time until the next use in the recorded step (the paper's access pattern), not the time
    since the last use.
    """
    parts: Annotated[int, Field(ge=1, le=64)] = 4
    """If memory is short, an element-wise op and the ops that recompute its inputs run together in this many
    parts, so that the tensors in between never exist in full (the paper's tensor partition); 1: never. Only
    ops with bitwise equal results in parts: on a GPU all element-wise ops, on CPU not those with an
    exponential.
    """
    cost_power: Annotated[float, Field(ge=0)] = 1.0
    """Exponent of the cost in the score."""
    size_power: Annotated[float, Field(ge=0)] = 1.0
    """Exponent of the bytes, including neighbouring holes."""
    time_power: Annotated[float, Field(ge=0)] = 1.0
    """Exponent of the age."""
    replay_base: Annotated[float, Field(ge=1)] = 1.0001
    """A score grows by this factor with every recomputation."""

    swap: bool = True
    """An evicted tensor may be copied to the host, after its last use and back before the next one, where
    that costs less than to recompute it: the part of both copies that no other op hides. Only by a schedule;
    with `online: true` every evicted tensor is recomputed.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return f"recomputes cheap tensors next to free memory, {format_budget(self.budget_bytes, self.ratio)}"

    def policy(self) -> Policy:
        """Return MegEngine's score with the chosen exponents."""
        own = (*BUDGET_KNOBS, "swap")
        return replace(MEGTAICHI, **{name: value for name, value in self.knobs() if name not in own})

    def options(self) -> tuple[Policy, ...]:
        """Return the score with the chosen exponents, and its alternatives; last those that swap."""
        return megtaichi_options(self.policy(), swap=self.swap)
