"""Coop: evict a run of neighbouring tensors at once, so that the freed bytes are contiguous."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from memtune.activations.eviction import COOP, Policy, coop_options
from memtune.search_spaces.recompute._schedule_planner.frozen_policy import DynamicPolicy
from memtune.technique import Exactness
from memtune.units import format_budget


class Coop(DynamicPolicy):
    """Recomputes single ops to stay within an arena, and evicts tensors so that the arena has no holes.

    A window slides over the arena in address order; the cheapest run of tensors that makes room for the
    request is evicted. Ops that change a tensor in place keep its address. The window is played with first
    and with best fit, and with recomputed tensors kept or dropped after their reader; the decisions that
    recompute least on the recorded step become a schedule.
    """

    kind: Literal["coop"] = "coop"
    title: ClassVar[str] = "Evict neighbours in a sliding window (Coop)"
    source: ClassVar[str] = "Zhang et al. 2023, Coop: Memory is not a Commodity, NeurIPS, arXiv:2311.00591"
    paper: ClassVar[str] = "Coop"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    groups: Literal[1, 2] = 1
    """2: outputs of cheap ops are at the arena's other end than those of products and convolutions."""
    neighbours: bool = True
    """A tensor's cost includes that of its evicted neighbourhood, not its own op alone."""
    small_area: bool = True
    """Tensors of at most 10 KiB are kept in a separate area."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        budget = format_budget(self.budget_bytes, self.ratio)
        return f"recomputes tensors that are neighbours in memory, {budget}"

    def policy(self) -> Policy:
        """Return Coop with the chosen parts."""
        counted: Any = "closure" if self.neighbours else "own"
        small_bytes = COOP.small_bytes if self.small_area else 0
        return replace(COOP, groups=self.groups, neighbours=counted, small_bytes=small_bytes)

    def options(self) -> tuple[Policy, ...]:
        """Return Coop with the chosen parts, with either fit."""
        return coop_options(self.policy())
