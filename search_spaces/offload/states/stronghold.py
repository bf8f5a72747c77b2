"""A working window of layers on the device, as wide as transfers need to stay hidden (STRONGHOLD, Sun et al.
2022).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.hardware import Hardware
from memtune.offload.core import BlockTimes, deferred_blocks, gathers_of
from memtune.offload.parameters import Overlap, native_update_bytes, not_in_layers
from memtune.program import Program, Step, columns_of, smallest_window
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common import (
    EAGER_ONLY,
    apply_layers,
    cannot_run_on_ranks,
    compute_s_of_moments,
    in_layers,
    no_such_block,
    window_of,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class StrongholdPlan(Plan):
    """The window, and the blocks that are updated late; what a plan leaves out, the knobs say."""

    slots: Annotated[int, Field(ge=1)] | None = None
    """Blocks on the device at once, the one that comes in counted."""
    late: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Blocks whose updates go on beside the next step's forward, ascending."""


class Stronghold(Technique):
    """Trades the blocks' weights over the link per pass for the bytes of all blocks but a window's.

    A window of consecutive blocks slides over the model and back: while one computes, the one that enters the
    window comes in on a stream of its own, and the one that has left it is gone. The planner solves for the
    smallest window under which no block is waited for, from modelled compute times and the link's rate, and
    makes it smaller where the budget does not hold it. Gradients leave as they land, a block's at once, and
    each block is updated on the host beside the rest of backward. Updates that the host does not come to
    there go on beside the next step's forward: a block's is over before its weights come in. The planner
    chooses which ones. Memory for the window is taken and given back with each block (the paper reserves
    buffers), and one stream computes. `optimizer.state`, state dicts and copies of the optimizer wait for
    late updates; values read through `optimizer.param_groups`, or kept from an earlier read, may be of the
    step before.

    Distinguishing test: a block's weights come in while others compute, the window's width is the smallest
    that the inequality allows (brute force), and blocks of the window at the turn do not come in again for
    backward; updates of late blocks are under way when the step returns.
    """

    kind: Literal["stronghold"] = "stronghold"
    slot: ClassVar[str] = "offload.states"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (StrongholdPlan,)
    title: ClassVar[str] = "A solved window of layers on the device"
    source: ClassVar[str] = (
        "Sun et al. 2022, STRONGHOLD: Fast and Affordable Billion-Scale Deep Learning Model Training, SC 22"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    effects: ClassVar[Effects] = Effects(
        averages="blocks", calls="block_hooks", moves="block", eager_only=EAGER_ONLY, host_share=1.0
    )

    window: Annotated[int, Field(ge=1)] | None = None
    """Blocks on the device at once, the one that comes in counted; none given: solved for."""
    trigger: Literal["beside_backward", "end_of_step"] = "beside_backward"
    """When the host updates; at the end its cores are left to data loading and to issuing kernels until then.
    """
    late: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Blocks whose updates go on beside the next step's forward; none given: solved for; []: all end within
    the step.
    """

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.late and self.trigger == "end_of_step":
            raise ValueError(
                "updates at the end of the step are none beside the next one's forward: leave out trigger, or"
                " late"
            )
        return self

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks that run one after the other and share nothing, in float32; several ranks: replicas,
        or `fsdp`.
        """
        if (reason := cannot_run_on_ranks(self, program, target)) is not None:
            return reason
        if self.window is not None and self.window > len(program.step.blocks):
            return Reason(
                f"the model has {len(program.step.blocks)} blocks only",
                "a smaller window, or none to have it solved",
            )
        return no_such_block(self.late, program)

    def plan(self, program: Program, target: Target) -> StrongholdPlan:
        """The width of the window, and the blocks that are updated late."""
        if self.late is not None or self.trigger == "end_of_step":
            late = frozenset(self.late or ())
        else:
            late = _late(program, target.hardware)
        beside = self._beside(late)
        slots = (
            self.window
            if self.window is not None
            else _solved(program, target.hardware, target.budget_bytes, beside)
        )
        return StrongholdPlan(slots=slots, late=tuple(sorted(late)))

    def rewrite(self, program: Program, plan: StrongholdPlan, target: Target) -> Program:
        """Every block in a window as wide as planned."""
        assert plan.slots is not None, "`plan` decides the window"
        return in_layers(program, window_of(program, plan.slots), self._beside(plan.late or ()))

    def _beside(self, late: Iterable[int]) -> Overlap:
        return Overlap(frozenset(late), self.trigger == "end_of_step")

    def apply(self, context: Context, plan: StrongholdPlan) -> None:
        """Blocks' weights to the host, hooks that bring them in ahead of their use."""
        slots = plan.slots or self.window
        if slots is None or slots > len(context.blocks):
            raise ApplyError(
                f"stronghold has no window for {len(context.blocks)} blocks.",
                evidence=f"The plan says {slots}.",
                fix=(
                    f"offload: {{states: {{kind: stronghold, window: {min(2, len(context.blocks))}}}}}, or"
                    " plan it again"
                ),
                code="MT364",
            )
        late = plan.late if plan.late is not None else self.late or ()
        if max(late, default=0) >= len(context.blocks):
            raise ApplyError(
                "stronghold cannot leave updates of blocks that are not there; the model has"
                f" {len(context.blocks)}.",
                evidence=f"The plan says {late}.",
                fix="offload: {states: {kind: stronghold, late: []}}, or plan it again",
                code="MT364",
            )
        apply_layers(context, self.kind, slots, self._beside(late))

    def explain(self, plan: StrongholdPlan) -> tuple[str, ...]:
        """The width of the window, and how many blocks are updated late."""
        rest = f", {len(plan.late)} of them updated beside the next step's forward" if plan.late else ""
        return (f"{plan.slots} blocks on the device at once{rest}",) if plan.slots else ()

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of parameters and optimizer, when each block is updated, and the window."""
        slots = self.window if self.window is not None else "solved"
        how = {"parameters": "host", "optimizer": "host", "trigger": self.trigger, "slots": slots}
        return {"states.offload": {**how, "late": "solved" if self.late is None else list(self.late)}}


@functools.lru_cache(maxsize=64)
def _solved(program: Program, hardware: Hardware, budget_bytes: int | None, beside: Overlap) -> int:
    """The smallest window that waits for nothing, or the largest below it that the budget holds."""
    step = program.step
    if not_in_layers(step):
        return 1
    slots = smallest_window(
        compute_s_of_moments(step, hardware).tolist(),
        _load_s(step, hardware),
        gathered=gathers_of(step) is not None,
    )
    while budget_bytes is not None and slots > 1:
        if in_layers(program, window_of(program, slots), beside).step.peak_bytes() <= budget_bytes:
            break
        slots -= 1
    return slots


@functools.lru_cache(maxsize=64)
def _late(program: Program, hardware: Hardware) -> frozenset[int]:
    """The blocks whose updates the host does not come to in backward."""
    step = program.step
    if not_in_layers(step):
        return frozenset()
    blocks, compute_s, local = (
        len(step.blocks),
        compute_s_of_moments(step, hardware),
        hardware.local_ranks(program.ranks),
    )
    load_s = np.asarray(_load_s(step, hardware))
    columns, update_s = (
        columns_of(step.parameters),
        native_update_bytes(step) * local / hardware.host_adam_bytes_per_s,
    )
    trained, inside = columns.gradient >= 0, columns.block >= 0
    update = np.bincount(columns.block[trained & inside], update_s[trained & inside], blocks)
    outside = trained & ~inside
    links = 1 / hardware.host_to_device_bytes_per_s + 1 / hardware.device_to_host_bytes_per_s
    outside_s = float(update_s[outside].sum() + ((columns.numel * columns.itemsize)[outside] * links).sum())
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
    """Seconds that each block's weights take to come in."""
    columns = columns_of(step.parameters)
    inside = columns.block >= 0
    n_bytes = np.bincount(columns.block[inside], (columns.numel * columns.itemsize)[inside], len(step.blocks))
    return (n_bytes / hardware.host_to_device_bytes_per_s).tolist()  # type: ignore[no-any-return]
