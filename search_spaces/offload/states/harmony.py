"""Packs of layers over all micro-batches, loaded and offloaded once each and updated at once (Harmony)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune.effects import Effects
from memtune.hardware import Hardware
from memtune.offload.layer_major import Packs, Span, StageLayout, balanced, greedy, split
from memtune.offload.multiplexed import Partitions
from memtune.program import F64, Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.block_sizes import block_bytes
from memtune.search_spaces.offload.states._common.layer_rules import EAGER_ONLY
from memtune.search_spaces.offload.states._common.multiplexed_technique import (
    StagesPlan,
    apply_stages,
    cannot_run_stages,
    on_ranks,
    partitions,
    solve_within,
    stages_plan_fields,
    wrong_ranks_error,
)
from memtune.search_spaces.offload.states._common.pack_technique import (
    PacksPlan,
    apply_packs,
    cannot_run_packs,
    in_packs,
    within_budget,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.units import format_bytes

Packing = Literal["greedy", "balanced"]


class HarmonyPlan(PacksPlan):
    """Packs, and the bytes that they copy; on several ranks that share packs the plan is a `StagesPlan`."""

    swapped_bytes: Annotated[int, Field(ge=0)]
    """Bytes of weights reloaded and gradients offloaded per step."""


class Harmony(Technique):
    """Trades one more forward, and the packs' inputs of all micro-batches, for the blocks' weights, gradients
    and state.

    Blocks are joined to packs. A pack's weights are loaded once for the forward of all micro-batches and once
    for their backward (input-batch grouping), its gradients are summed on the device and offloaded once, and
    the host updates them at once (just-in-time update). Backward runs a pack's forward again from its input,
    except for the last pack: its backward follows its forward, and it is resident between them. So a step
    copies 3|W| - |W of the last pack| for any number of micro-batches, while layers that are loaded for each
    of m micro-batches copy 3m|W|. With `group` that is paid per group of micro-batches, and the inputs kept
    for backward shrink to one group's. With `joined` a pack of forward, which saves nothing, runs several
    micro-batches as one: the paper's unequal micro-batch sizes of forward and backward. Blocks may also be
    recomputed one by one (`recompute: {kind: selective}`): a pack then saves less, so fewer and larger packs
    fit.

    On several ranks each has its own micro-batches and all weights on its host (Harmony-DP): a gradient is
    averaged before it is offloaded, and each rank copies its 3|W|. With `parallelism: pipeline` (Harmony-PP)
    only rank j mod g holds pack j, all ranks work on all micro-batches, and together they copy 3|W|, less the
    last pack of each rank, which is resident between forward and backward. Such configs are written by hand,
    with `sharding: {states: {kind: none}}`.
    """

    kind: Literal["harmony"] = "harmony"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (HarmonyPlan, StagesPlan)
    title: ClassVar[str] = "Packs of layers over all micro-batches"
    clause: ClassVar[str] = "keeps the blocks in host memory, and runs packs of them over all micro-batches"
    source: ClassVar[str] = "Li et al. 2022, Harmony: Overcoming the Hurdles of GPU Memory Capacity, VLDB"
    paper: ClassVar[str] = "Harmony"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(
        averages="all",
        calls="block_hooks",
        layer_major=True,
        moves="block",
        parameters_on="host",
        eager_only=EAGER_ONLY,
        host_share=1.0,
    )

    packing: Packing = "balanced"
    """`balanced`: packs of nearly equal bytes; `greedy`: filled from the last block on."""
    backward: Annotated[int, Field(ge=1)] | None = None
    """Most blocks of a pack of backward. Default: as many as the budget holds."""
    forward: Annotated[int, Field(ge=1)] | None = None
    """Most blocks of a pack of forward, which saves nothing and may be larger. Default: as in backward."""
    group: Annotated[int, Field(ge=1)] | None = None
    """Micro-batches that a pack runs before it is freed. Default: all of a step."""
    joined: Annotated[int, Field(ge=1)] = 1
    """Micro-batches that a pack of forward runs as one batch, for fewer and larger ops. Blocks must treat
    samples alike, which the first step checks.
    """
    boundaries: Literal["device", "host"] = "device"
    """Tier of the packs' inputs until backward."""
    prefetch: bool = False
    """The next pack is loaded while one computes (double buffering), for the bytes of both."""
    parallelism: Literal["data", "pipeline"] = "data"
    """On several ranks: each runs all packs on its own micro-batches, or its own packs on all of them."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require a chain of blocks without random numbers and statistics, in float32, whole on ranks."""
        if not self._is_pipeline(target.ranks):
            most = min(self.group or program.accumulate, program.accumulate)
            if self.joined > most:
                return Reason(f"joined={self.joined}, but packs run {most} micro-batches", "joined: 1")
            return cannot_run_packs(self, program, target, alone=False)
        if self.forward is not None or self.group is not None or self.joined > 1:
            return Reason(
                "packs of a pipeline run forward and backward alike, over all micro-batches",
                "no forward, no group, joined: 1",
            )
        return cannot_run_stages(self, program, target, _counts(self, program, target.ranks)[0])

    def _is_pipeline(self, ranks: int) -> bool:
        return ranks > 1 and self.parallelism == "pipeline"

    def plan(self, program: Program, target: Target) -> HarmonyPlan | StagesPlan:
        if self._is_pipeline(program.ranks):
            return StagesPlan(
                **stages_plan_fields(program, _on_ranks(self, program, target.hardware, target.budget_bytes))
            )
        packs = _planned(self, program, target.budget_bytes)
        return HarmonyPlan(
            forward=packs.forward, backward=packs.backward, swapped_bytes=_swapped_bytes(program, packs)
        )

    def rewrite(self, program: Program, plan: HarmonyPlan | StagesPlan, target: Target) -> Program:
        """Run all micro-batches pack by pack."""
        if isinstance(plan, StagesPlan):
            return on_ranks(program, plan.layout(prefetch=self.prefetch), target.hardware, self.boundaries)
        return in_packs(program, plan.packs(**self._settings()), self.boundaries)

    def apply(self, context: Context, plan: HarmonyPlan | StagesPlan) -> None:
        """Move weights and optimizer to the host; `Tuned.step` runs packs."""
        if self._is_pipeline(context.placement.world_size):
            apply_stages(context, plan, self.kind, prefetch=self.prefetch, boundaries=self.boundaries)
            return
        if isinstance(plan, StagesPlan):
            raise wrong_ranks_error(context, self.kind)
        apply_packs(context, plan.packs(**self._settings()), self.boundaries, self.kind)

    def _settings(self) -> dict[str, Any]:
        return {"prefetch": self.prefetch, "group": self.group or 0, "joined": self.joined}

    def explain(self, plan: HarmonyPlan | StagesPlan) -> tuple[str, ...]:
        if isinstance(plan, StagesPlan):
            return plan.explain()
        widest, swapped = max(last - first for first, last in plan.backward), format_bytes(plan.swapped_bytes)
        return (
            (
                f"{len(plan.backward)} packs of up to {widest} blocks over all micro-batches,"
                f" {swapped} copied per step"
            ),
        )

    def record(self, target: Target) -> dict[str, Any]:
        knobs = {name: value for name, value in self.knobs() if name != "parallelism" or target.ranks > 1}
        return {
            "states.offload": {
                "parameters": "host",
                "optimizer": "host",
                "trigger": "in_backward",
                "packs": knobs,
            }
        }

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # Prefetch hides copies and takes room. Few packs copy least; as many as blocks leave less at the ends
        # of the step that no computation hides. Forward runs the packs of backward: wider ones load later and
        # were never faster (simulated).
        return {"prefetch": (False, True), "backward": (None, 1), "joined": (1, 4)}


def _swapped_bytes(program: Program, packs: Packs) -> int:
    """Return the bytes of weights loaded and gradients offloaded in one step."""
    # 3|W| less the last pack, which is resident between forward and backward.
    weights, gradients = block_bytes(program.step)[:2]
    groups = len(packs.groups(program.accumulate))
    return groups * (2 * sum(weights) - sum(weights[slice(*packs.turnaround)]) + sum(gradients))


def _counts(technique: Harmony, program: Program, ranks: int) -> list[int]:
    """Return possible numbers of packs, ascending multiples of `ranks`; `ranks` for fewer blocks."""
    blocks = len(program.step.blocks)
    least = -(-blocks // technique.backward) if technique.backward else 1
    return list(range(-(-least // ranks) * ranks, blocks + 1, ranks)) or [max(blocks // ranks, 1) * ranks]


@functools.lru_cache(maxsize=32)
def _on_ranks(
    technique: Harmony, program: Program, hardware: Hardware, budget_bytes: int | None
) -> StageLayout:
    """Return the fewest packs, as many on each rank, that fit, or those that need least."""
    each = partitions(
        program, hardware, prefetch=technique.prefetch, crossed=False, boundaries=technique.boundaries
    )
    layouts = _layouts(technique, program, each)

    def solve(room: F64) -> StageLayout | None:
        return next((layout for layout in layouts if (each.needed(layout) <= room).all()), None)

    found = solve_within(program, hardware, budget_bytes, technique.boundaries, solve, each)
    return found or min(layouts, key=lambda layout: (each.needed(layout).max(), len(layout.stages)))


def _layouts(technique: Harmony, program: Program, each: Partitions) -> list[StageLayout]:
    """Return a layout for each number of packs by `packing` and `backward`, fewest packs first."""
    sizes, ranks = each.piece_bytes, program.ranks
    counts = [count for count in _counts(technique, program, ranks) if count <= len(sizes)]
    if technique.packing == "balanced":
        return [each.over_pieces(balanced(sizes, count)) for count in counts]
    found: dict[int, StageLayout] = {}
    for width in [technique.backward] if technique.backward else range(len(sizes), 0, -1):
        packs = greedy(sizes, _largest_pack_bytes(sizes, min(width, len(sizes))))
        count = -(-len(packs) // ranks) * ranks
        if count <= len(sizes):
            found.setdefault(count, each.over_pieces(split(packs, count)))
    return [found[count] for count in sorted(found)] or [each.over_pieces(balanced(sizes, counts[-1]))]


@functools.lru_cache(maxsize=64)
def _planned(technique: Harmony, program: Program, budget_bytes: int | None) -> Packs:
    """Return the fewest packs whose step stays within the budget by the pass, or those that need least."""
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
    """Return packs of backward of about `width` blocks, and those of forward before the last of them."""
    sizes = block_bytes(program.step)
    need = [sum(each) for each in zip(sizes.weights, sizes.gradients, sizes.saved, strict=True)]
    if technique.packing == "balanced":
        backward = balanced(need, -(-len(need) // width))
    else:
        backward = greedy(need, _largest_pack_bytes(need, width))
    forward: tuple[Span, ...] = backward[:-1]
    if technique.forward and forward:
        forward = greedy([1] * backward[-1][0], technique.forward)
    return Packs(forward, backward, technique.prefetch, technique.group or 0, joined=technique.joined)


def _largest_pack_bytes(n_bytes: Sequence[int], width: int) -> int:
    """Return the bytes of the largest pack of `width` neighbours."""
    return max(sum(n_bytes[i : i + width]) for i in range(len(n_bytes) - width + 1))


def _needed(technique: Harmony, program: Program, packs: Packs) -> int:
    """Return about the bytes at the peak: the largest pack, the prefetched one, the kept inputs."""
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
    return most + waiting + sizes.other
