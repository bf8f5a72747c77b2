"""Packs of layers over all micro-batches, swapped in and out once each, updated at once (Harmony, Li et al.
2022).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune.effects import Effects
from memtune.hardware import Hardware
from memtune.offload.layer_major import OnRanks, Packs, Span, balanced, greedy, split
from memtune.offload.multiplexed import Partitions
from memtune.program import F64, Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common import (
    EAGER_ONLY,
    PacksPlan,
    StagesPlan,
    apply_in_turn,
    apply_packs,
    backward_packs,
    block_bytes,
    fields_of,
    for_other_ranks,
    in_packs,
    not_in_packs,
    not_in_turn,
    on_ranks,
    partitions,
    within,
    within_budget,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_bytes

Packing = Literal["greedy", "balanced"]


class HarmonyPlan(PacksPlan):
    """Packs, and what they move; on several ranks that share them a plan is a `StagesPlan`."""

    swapped_bytes: Annotated[int, Field(ge=0)]
    """Bytes of weights reloaded and gradients offloaded per step."""


class Harmony(Technique):
    """Trades one more forward and what packs start from, of all micro-batches, for the blocks' weights,
    gradients and state.

    Blocks are joined to packs. A pack's weights come in once for the forward of all micro-batches and once
    for their backward (input-batch grouping), its gradients are summed on the device, leave once, and the
    host updates them at once (just-in-time update). Backward runs a pack forward again from what it started
    from; the last pack, whose backward follows its forward, does not, and stays. So a step moves 3|W| - |W of
    the last pack|, whatever the number of micro-batches, where layers that come and go for each of m
    micro-batches move 3m|W|. With `group` that is paid per group of micro-batches, and what waits for
    backward shrinks to one group's. Micro-batches keep their size: the paper's unequal sizes of forward and
    backward would split and join the user's samples. Beside it blocks may be recomputed one by one
    (`recompute: {kind: selective}`): a pack then saves less, so fewer and larger packs fit.

    On several ranks each has its own micro-batches and all weights on its host (Harmony-DP): a gradient is
    averaged before it leaves the device, and each rank moves its 3|W|. With `across: pipeline` (Harmony-PP)
    pack j is on rank j mod g, which alone holds it, all ranks work on all micro-batches, and 3|W| are moved
    by all of them together, less the last pack of each rank, which stays between forward and backward. Such
    configs are written by hand, with `sharding: {states: {kind: none}}`.

    Distinguishing test: bytes on the link do not grow with the number of micro-batches, and each pack is
    updated before the pack before it runs backward.
    """

    kind: Literal["harmony"] = "harmony"
    slot: ClassVar[str] = "offload.states"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (HarmonyPlan, StagesPlan)
    title: ClassVar[str] = "Packs of layers over all micro-batches"
    source: ClassVar[str] = "Li et al. 2022, Harmony: Overcoming the Hurdles of GPU Memory Capacity, VLDB"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(
        averages="all",
        calls="block_hooks",
        packs=backward_packs,
        moves="block",
        eager_only=EAGER_ONLY,
        host_share=1.0,
    )

    packing: Packing = "balanced"
    """`balanced`: packs as even in bytes as can be; `greedy`: filled from the last block on."""
    backward: Annotated[int, Field(ge=1)] | None = None
    """Most blocks of a pack of backward; none given: as many as the budget holds."""
    forward: Annotated[int, Field(ge=1)] | None = None
    """Most blocks of a pack of forward, which saves nothing and may be larger; none given: those of backward.
    """
    group: Annotated[int, Field(ge=1)] | None = None
    """Micro-batches that a pack runs before it is let go; none given: all of a step."""
    boundaries: Literal["device", "host"] = "device"
    """Where what packs start from waits for backward."""
    prefetch: bool = False
    """The next pack comes in while one computes (double buffering), for the bytes of both."""
    across: Literal["data", "pipeline"] = "data"
    """On several ranks: each runs all packs on its own micro-batches, or its own packs on all of them."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks that are a chain without random numbers and statistics, in float32; ranks must not
        divide or replicate.
        """
        if not self._is_pipeline(target.ranks):
            return not_in_packs(self, program, target, alone=False)
        if self.forward is not None or self.group is not None:
            return Reason(
                "packs on several ranks run forward and backward alike, over all micro-batches",
                "no forward, no group",
            )
        return not_in_turn(self, program, target, _counts(self, program, target.ranks)[0])

    def _is_pipeline(self, ranks: int) -> bool:
        return ranks > 1 and self.across == "pipeline"

    def plan(self, program: Program, target: Target) -> HarmonyPlan | StagesPlan:
        """Which blocks are in which pack, and where."""
        if self._is_pipeline(program.ranks):
            return StagesPlan(
                **fields_of(program, _on_ranks(self, program, target.hardware, target.budget_bytes))
            )
        packs = _planned(self, program, target.budget_bytes)
        return HarmonyPlan(
            forward=packs.forward, backward=packs.backward, swapped_bytes=_swapped(program, packs)
        )

    def rewrite(self, program: Program, plan: HarmonyPlan | StagesPlan, target: Target) -> Program:
        """All micro-batches, pack by pack."""
        if isinstance(plan, StagesPlan):
            return on_ranks(program, plan.layout(prefetch=self.prefetch), target.hardware, self.boundaries)
        return in_packs(program, plan.packs(**self._settings()), self.boundaries)

    def apply(self, context: Context, plan: HarmonyPlan | StagesPlan) -> None:
        """Weights and optimizer to the host; `Tuned.step` runs packs."""
        if self._is_pipeline(context.placement.world_size):
            apply_in_turn(context, plan, self.kind, prefetch=self.prefetch, boundaries=self.boundaries)
            return
        if isinstance(plan, StagesPlan):
            raise for_other_ranks(context, self.kind)
        apply_packs(context, plan.packs(**self._settings()), self.boundaries, self.kind)

    def _settings(self) -> dict[str, Any]:
        return {"prefetch": self.prefetch, "group": self.group or 0}

    def explain(self, plan: HarmonyPlan | StagesPlan) -> tuple[str, ...]:
        """How many packs there are, and what they move."""
        if isinstance(plan, StagesPlan):
            return plan.explain()
        widest, swapped = max(last - first for first, last in plan.backward), format_bytes(plan.swapped_bytes)
        return (
            (
                f"{len(plan.backward)} packs of up to {widest} blocks over all micro-batches, {swapped} moved"
                " per step"
            ),
        )

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of parameters and optimizer, when packs are updated, and how packs are made."""
        knobs = {name: value for name, value in self.knobs() if name != "across" or target.ranks > 1}
        return {
            "states.offload": {
                "parameters": "host",
                "optimizer": "host",
                "trigger": "in_backward",
                "packs": knobs,
            }
        }


def _swapped(program: Program, packs: Packs) -> int:
    """Bytes of weights in and gradients out in one step: 3|W| less the turn's, which stay between forward and
    backward.
    """
    weights, gradients = block_bytes(program.step)[:2]
    groups = len(packs.groups(program.accumulate))
    return groups * (2 * sum(weights) - sum(weights[slice(*packs.turn)]) + sum(gradients))


def _counts(technique: Harmony, program: Program, ranks: int) -> list[int]:
    """Numbers of packs, as many on each rank, the fewest first; `ranks` where there are fewer blocks."""
    blocks = len(program.step.blocks)
    least = -(-blocks // technique.backward) if technique.backward else 1
    return list(range(-(-least // ranks) * ranks, blocks + 1, ranks)) or [max(blocks // ranks, 1) * ranks]


@functools.lru_cache(maxsize=32)
def _on_ranks(technique: Harmony, program: Program, hardware: Hardware, budget_bytes: int | None) -> OnRanks:
    """The fewest packs, as many on each rank, that fit, or those that need least."""
    each = partitions(
        program, hardware, prefetch=technique.prefetch, crossed=False, boundaries=technique.boundaries
    )
    layouts = _layouts(technique, program, each)

    def solve(room: F64) -> OnRanks | None:
        return next((layout for layout in layouts if (each.needed(layout) <= room).all()), None)

    found = within(program, hardware, budget_bytes, technique.boundaries, solve, each)
    return found or min(layouts, key=lambda layout: (each.needed(layout).max(), len(layout.stages)))


def _layouts(technique: Harmony, program: Program, each: Partitions) -> list[OnRanks]:
    """As `packing` and `backward` say, the fewest packs first."""
    sizes, ranks = each.piece_bytes, program.ranks
    counts = [count for count in _counts(technique, program, ranks) if count <= len(sizes)]
    if technique.packing == "balanced":
        return [each.over_pieces(balanced(sizes, count)) for count in counts]
    found: dict[int, OnRanks] = {}
    for width in [technique.backward] if technique.backward else range(len(sizes), 0, -1):
        packs = greedy(sizes, _widest(sizes, min(width, len(sizes))))
        count = -(-len(packs) // ranks) * ranks
        if count <= len(sizes):
            found.setdefault(count, each.over_pieces(split(packs, count)))
    return [found[count] for count in sorted(found)] or [each.over_pieces(balanced(sizes, counts[-1]))]


@functools.lru_cache(maxsize=64)
def _planned(technique: Harmony, program: Program, budget_bytes: int | None) -> Packs:
    """The fewest packs whose step stays within the budget, or those whose step needs least; the pass confirms
    it.
    """
    blocks = len(program.step.blocks)
    widths = [technique.backward] if technique.backward else list(range(blocks, 0, -1))
    needs = {
        packs: _needed(technique, program, packs)
        for packs in (_packed(technique, program, min(w, blocks)) for w in widths)
    }
    least = min(needs, key=lambda packs: (needs[packs], len(packs.backward)))
    if len(needs) == 1 or budget_bytes is None:
        return least

    def solve(room: F64) -> Packs | None:
        return next((packs for packs, need in needs.items() if need <= room[0]), None)

    def peaks(packs: Packs) -> F64:
        return np.array([float(in_packs(program, packs, technique.boundaries).step.peak_bytes())])

    return within_budget(solve, lambda packs: np.array([float(needs[packs])]), peaks, budget_bytes) or least


def _packed(technique: Harmony, program: Program, width: int) -> Packs:
    """Packs of backward of about `width` blocks, and those of forward before the last of them."""
    sizes = block_bytes(program.step)
    need = [sum(each) for each in zip(sizes.weights, sizes.gradients, sizes.saved, strict=True)]
    if technique.packing == "balanced":
        backward = balanced(need, -(-len(need) // width))
    else:
        backward = greedy(need, _widest(need, width))
    forward: tuple[Span, ...] = backward[:-1]
    if technique.forward and forward:
        forward = greedy([1] * backward[-1][0], technique.forward)
    return Packs(forward, backward, technique.prefetch, technique.group or 0)


def _widest(n_bytes: Sequence[int], width: int) -> int:
    """Bytes of the largest pack of `width` neighbours."""
    return max(sum(n_bytes[i : i + width]) for i in range(len(n_bytes) - width + 1))


def _needed(technique: Harmony, program: Program, packs: Packs) -> int:
    """About the bytes of the device at the peak: the largest pack, what comes in beside it, and what waits
    for backward.
    """
    sizes = block_bytes(program.step)
    waiting = sizes.boundary * len(packs.groups(program.accumulate)[0]) * (len(packs.backward) - 1)
    waiting = waiting if technique.boundaries == "device" else 0
    most = 0
    for number, (pack, following) in enumerate(zip(packs.uses, [*packs.uses[1:], (0, 0)], strict=True)):
        need = sum(sizes.weights[slice(*pack)]) + (
            sum(sizes.weights[slice(*following)]) if packs.prefetch else 0
        )
        if number >= len(packs.forward):
            need += sum(sizes.gradients[slice(*pack)]) + sum(sizes.saved[slice(*pack)])
        most = max(most, need)
    return most + waiting + sizes.beside
