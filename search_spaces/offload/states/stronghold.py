"""A working window of layers on the device, as wide as needed to overlap copies (STRONGHOLD)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from memtune import refusals
from memtune.effects import Effects
from memtune.hardware import Hardware
from memtune.offload.core import BlockTimes, deferred_blocks
from memtune.offload.parameters import Overlap, native_update_bytes, not_in_layers, window_of
from memtune.program import Program, Step, columns_of, gathers_of, smallest_window
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.layer_apply import apply_layers
from memtune.search_spaces.offload.states._common.layer_offload import compute_s_of_moments, in_layers
from memtune.search_spaces.offload.states._common.layer_rules import (
    EAGER_ONLY,
    cannot_run_on_ranks,
    other_gathers,
)
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique


class StrongholdPlan(Plan):
    """The window, and the blocks of deferred updates; the knobs give missing values."""

    slots: Annotated[int, Field(ge=1)] | None = None
    """Blocks on the device at once, including the one being loaded."""
    deferred: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Blocks whose updates overlap with the next step's forward, ascending."""


class Stronghold(Technique):
    """Trades copies of the blocks' weights in each pass for the bytes of all blocks except a window's.

    A window of consecutive blocks slides over the model and back: while one computes, the next one of the
    window is loaded on a stream of its own, and the one behind the window is freed. The planner solves for
    the smallest window that hides all loads, from modelled compute times and the link's rate, and shrinks it
    to fit the budget. Gradients are offloaded when they are ready, and each block is updated on the host,
    overlapped with the rest of backward. Updates that the host cannot finish there are deferred: they overlap
    with the next step's forward, and each ends before its block's weights are loaded. The planner chooses
    these blocks. Memory of the window is allocated and freed with each block (the paper reserves buffers),
    and one stream computes. `optimizer.state`, state dicts and copies of the optimizer wait for deferred
    updates; values read through `optimizer.param_groups`, or references from an earlier read, may be one step
    stale.
    """

    kind: Literal["stronghold"] = "stronghold"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (StrongholdPlan,)
    title: ClassVar[str] = "A solved window of layers on the device"
    source: ClassVar[str] = (
        "Sun et al. 2022, STRONGHOLD: Fast and Affordable Billion-Scale Deep Learning Model Training, SC 22"
    )
    paper: ClassVar[str] = "STRONGHOLD"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(
        averages="blocks",
        calls="block_hooks",
        moves="block",
        parameters_on="host",
        eager_only=EAGER_ONLY,
        host_share=1.0,
    )

    window: Annotated[int, Field(ge=1)] | None = None
    """Blocks on the device at once, including the one being loaded. Default: solved."""
    trigger: Literal["in_backward", "end_of_step"] = "in_backward"
    """Time of the host's updates; with `end_of_step` its cores are free for data loading and kernel launches
    until then.
    """
    deferred: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Blocks updated in the next step's forward. Default: solved; []: all updates end within the step."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        window = "as many as fit" if self.window is None else f"{self.window} of them"
        return f"keeps the blocks in host memory, with {window} on the device"

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.deferred and self.trigger == "end_of_step":
            raise ValueError(
                "updates at the end of the step cannot overlap with the next one's forward:"
                " leave out trigger, or deferred"
            )
        return self

    def refuses(self, facts: Facts) -> Reason | None:
        return other_gathers(facts) or _too_many_blocks(facts.blocks, self.window or 1, self.deferred or ())

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require a chain of blocks without shared parameters, in float32; on ranks replicas, or `fsdp`."""
        return self.refuses(Facts.of(program, target)) or cannot_run_on_ranks(self, program, target)

    def plan(self, program: Program, target: Target) -> StrongholdPlan:
        if self.deferred is not None or self.trigger == "end_of_step":
            deferred = frozenset(self.deferred or ())
        else:
            deferred = _deferred(program, target.hardware)
        overlap = self._overlap(deferred)
        slots = (
            self.window
            if self.window is not None
            else _solved(program, target.hardware, target.budget_bytes, overlap)
        )
        return StrongholdPlan(slots=slots, deferred=tuple(sorted(deferred)))

    def rewrite(self, program: Program, plan: StrongholdPlan, target: Target) -> Program:
        """Load every block in a window of the planned width."""
        assert plan.slots is not None, "`plan` decides the window"
        return in_layers(program, window_of(program, plan.slots), self._overlap(plan.deferred or ()))

    def _overlap(self, deferred: Iterable[int]) -> Overlap:
        return Overlap(frozenset(deferred), self.trigger == "end_of_step")

    def apply(self, context: Context, plan: StrongholdPlan) -> None:
        """Move blocks' weights to the host and add hooks that prefetch them."""
        slots = plan.slots or self.window
        deferred = plan.deferred if plan.deferred is not None else self.deferred or ()
        if slots is None:
            raise refusals.plan_of_other_model(
                "offload.states: {kind: stronghold}", "The plan has no window.", "a window"
            )
        if (reason := _too_many_blocks(len(context.blocks), slots, deferred)) is not None:
            evidence = f"The plan has a window of {slots} and defers {list(deferred)}."
            raise refusals.error_of(reason, evidence)
        apply_layers(context, slots, self._overlap(deferred))

    def explain(self, plan: StrongholdPlan) -> tuple[str, ...]:
        rest = f", {len(plan.deferred)} of them with deferred updates" if plan.deferred else ""
        return (f"{plan.slots} blocks on the device at once{rest}",) if plan.slots else ()

    def record(self, target: Target) -> dict[str, Any]:
        slots = self.window if self.window is not None else "solved"
        knobs = {"parameters": "host", "optimizer": "host", "trigger": self.trigger, "slots": slots}
        return {
            "states.offload": {
                **knobs,
                "deferred": "solved" if self.deferred is None else list(self.deferred),
            }
        }


def _too_many_blocks(blocks: int, slots: int, deferred: Sequence[int]) -> Reason | None:
    """Return why a model of `blocks` has no window of `slots`, or not the blocks `deferred`."""
    if slots > blocks:
        return refusals.few_blocks(blocks, "a smaller window, or none to have it solved")
    return refusals.no_block_to_defer(deferred, blocks)


@functools.lru_cache(maxsize=64)
def _solved(program: Program, hardware: Hardware, budget_bytes: int | None, overlap: Overlap) -> int:
    """Return the smallest window that hides all loads, or the largest below it that the budget holds."""
    step = program.step
    if not_in_layers(step):
        return 1
    slots = smallest_window(
        compute_s_of_moments(step, hardware).tolist(),
        _load_s(step, hardware),
        gathered=gathers_of(step) is not None,
    )
    # Loads that compute does not hide cost time, a window over the budget costs the whole setting.
    while budget_bytes is not None and slots > 1:
        if in_layers(program, window_of(program, slots), overlap).step.peak_bytes() <= budget_bytes:
            break
        slots -= 1
    return slots


@functools.lru_cache(maxsize=64)
def _deferred(program: Program, hardware: Hardware) -> frozenset[int]:
    """Return the blocks whose updates the host cannot finish in backward."""
    step = program.step
    if not_in_layers(step):
        return frozenset()
    blocks = len(step.blocks)
    compute_s = compute_s_of_moments(step, hardware)
    local = hardware.local_ranks(program.ranks)
    load_s = np.asarray(_load_s(step, hardware))
    columns = columns_of(step.parameters)
    update_s = native_update_bytes(step) * local / hardware.host_adam_bytes_per_s
    trained, inside = columns.gradient >= 0, columns.block >= 0
    # Host threads and memory are shared by the ranks of the host, so an update takes `local` times as long.
    update = np.bincount(columns.block[trained & inside], update_s[trained & inside], blocks)
    outside = trained & ~inside
    links = 1 / hardware.host_to_device_bytes_per_s + 1 / hardware.device_to_host_bytes_per_s
    outside_s = float(update_s[outside].sum() + (columns.n_bytes[outside] * links).sum())
    down = load_s * hardware.host_to_device_bytes_per_s / hardware.device_to_host_bytes_per_s
    return deferred_blocks(
        BlockTimes(
            forward_s=compute_s[:blocks].tolist(),
            backward_s=compute_s[blocks:][::-1].tolist(),
            load_s=load_s.tolist(),
            down_s=down.tolist(),
            update_s=update.tolist(),
            outside_s=outside_s,
        )
    )


def _load_s(step: Step, hardware: Hardware) -> list[float]:
    """Return the seconds to load each block's weights."""
    columns = columns_of(step.parameters)
    inside = columns.block >= 0
    n_bytes = np.bincount(columns.block[inside], columns.n_bytes[inside], len(step.blocks))
    return (n_bytes / hardware.host_to_device_bytes_per_s).tolist()  # type: ignore[no-any-return]
