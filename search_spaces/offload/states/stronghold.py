"""A working window of layers on the device, as wide as transfers need to stay hidden (STRONGHOLD, Sun et al. 2022)."""

from __future__ import annotations

import functools
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune.errors import ApplyError
from memtune.hardware import Hardware
from memtune.parameters import columns_of
from memtune.passes.gathered_rows import gathers_of
from memtune.passes.stream import not_in_layers
from memtune.program import Program, Step
from memtune.residency import smallest_window
from memtune.runtime.context import Context
from memtune.search_spaces.offload.states._layers import (
    EAGER_ONLY,
    apply_layers,
    cannot_run_on_ranks,
    compute_s_of_moments,
    in_layers,
    window_of,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class Stronghold(Technique):
    """Trades the blocks' weights over the link per pass for the bytes of all blocks but a window's.

    A window of consecutive blocks slides over the model and back: while one computes, the one that enters the window comes in
    on a stream of its own, and the one that has left it is gone. The planner solves for the smallest window under which no block
    is waited for, from modelled compute times and the link's rate, and makes it smaller where the budget does not hold it.
    Gradients leave as they land and each block is updated on the host beside the rest of backward. Memory for the window is taken
    and given back with each block (the paper reserves buffers), and one stream computes.

    Distinguishing test: a block's weights come in while others compute, the window's width is the smallest that the inequality
    allows (brute force), and blocks of the window at the turn do not come in again for backward.
    """

    kind: Literal["stronghold"] = "stronghold"
    slot: ClassVar[str] = "offload.states"
    title: ClassVar[str] = "A solved window of layers on the device"
    source: ClassVar[str] = "Sun et al. 2022, STRONGHOLD: Fast and Affordable Billion-Scale Deep Learning Model Training, SC 22"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    eager_only: ClassVar[str] = EAGER_ONLY
    averages_blocks: ClassVar[bool] = True

    window: Annotated[int, Field(ge=1)] | None = None
    """Blocks on the device at once, the one that comes in counted; none given: solved for."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks that run one after the other and share nothing, in float32; several ranks: replicas, or `fsdp`."""
        if (reason := cannot_run_on_ranks(program, target)) is not None:
            return reason
        if self.window is not None and self.window > len(program.step.blocks):
            return Reason(f"the model has {len(program.step.blocks)} blocks only", "a smaller window, or none to have it solved")
        return None

    def plan(self, program: Program, target: Target) -> Plan:
        """The width of the window."""
        slots = self.window if self.window is not None else _solved(program, target.hardware, target.budget_bytes)
        return Plan(decisions={"slots": slots})

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Every block in a window as wide as planned."""
        return in_layers(program, window_of(program, int(plan.decisions["slots"])))

    def apply(self, context: Context, plan: Plan) -> None:
        """Blocks' weights to the host, hooks that bring them in ahead of their use."""
        slots = plan.decisions.get("slots", self.window)
        if not isinstance(slots, int) or not 1 <= slots <= len(context.blocks):
            raise ApplyError(
                f"stronghold has no window for {len(context.blocks)} blocks.",
                evidence=f"The plan says {slots}.",
                fix=f"offload: {{states: {{kind: stronghold, window: {min(2, len(context.blocks))}}}}}, or plan it again",
                code="MT364",
            )  # fmt: skip
        apply_layers(context, self.kind, slots)

    def explain(self, plan: Plan) -> tuple[str, ...]:
        """The width of the window."""
        slots = plan.decisions.get("slots")
        return (f"{slots} blocks on the device at once",) if isinstance(slots, int) else ()

    def least_share_on_host(self) -> float:
        """All of it."""
        return 1.0

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of parameters and optimizer, when each block is updated, and the window."""
        slots = self.window if self.window is not None else "solved"
        return {"states.offload": {"parameters": "host", "optimizer": "host", "trigger": "in_backward", "slots": slots}}


@functools.lru_cache(maxsize=64)
def _solved(program: Program, hardware: Hardware, budget_bytes: int | None) -> int:
    """The smallest window that waits for nothing, or the largest below it that the budget holds."""
    step = program.step
    if not_in_layers(step):
        return 1
    slots = smallest_window(
        compute_s_of_moments(step, hardware).tolist(), _load_s(step, hardware), gathered=gathers_of(step) is not None
    )
    while budget_bytes is not None and slots > 1:
        if in_layers(program, window_of(program, slots)).step.peak_bytes() <= budget_bytes:
            break
        slots -= 1
    return slots


def _load_s(step: Step, hardware: Hardware) -> list[float]:
    """Seconds that each block's weights take to come in."""
    columns = columns_of(step.parameters)
    inside = columns.block >= 0
    n_bytes = np.bincount(columns.block[inside], (columns.numel * columns.itemsize)[inside], len(step.blocks))
    return (n_bytes / hardware.host_to_device_bytes_per_s).tolist()  # type: ignore[no-any-return]
