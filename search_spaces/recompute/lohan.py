"""Swap as many bytes of activations as pays, recompute the rest (LoHan, Liao et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune import refusals
from memtune.effects import DISPATCH_MODE, Effects
from memtune.hardware import Hardware
from memtune.program import INPUTS, Phase, Program, RankClass, Step, calls_of, split_calls
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes, Index
from memtune.search_spaces._support import conflict
from memtune.search_spaces.recompute._block_planner.budget import apply_later_passes, later_techniques
from memtune.search_spaces.recompute._block_planner.call_selection import Block, block_graphs
from memtune.search_spaces.recompute._block_planner.claims import (
    OptionEntry,
    OptionsPlan,
    SpillSpec,
    claim_planned,
    option_fields,
    rewrite_planned,
)
from memtune.search_spaces.recompute._block_planner.fits import cannot_recompute
from memtune.search_spaces.recompute._block_planner.measured_options import (
    FULL,
    MIN_MOVED_BYTES,
    Option,
    apply_options,
    block_ops,
    op_seconds,
    to_option,
)
from memtune.search_spaces.recompute._block_planner.swap import (
    Part,
    SwapChoice,
    busy_seconds,
    bytes_of,
    hull,
    parts_of,
    spilled_blocks,
)
from memtune.search_spaces.recompute._block_planner.tensor_options import BlockOp, Combination, combinations
from memtune.technique import Exactness, Plan, Reason, Target, Technique, no_directory
from memtune.units import format_bytes, format_seconds

_LIMIT = 64
"""Combinations of a block from which its hull is built."""


class LohanPlan(OptionsPlan):
    """Calls that each block recomputes and offloads, blocks that go on to SSD, and the step times."""

    on_ssd: tuple[Index, ...] = ()
    """Blocks whose offloaded tensors go on from the host to SSD."""
    read_prefetch: Annotated[int, Field(ge=0)] = 0
    """Tensors that are read from SSD before backward asks for them."""
    spilled_bytes: Bytes = 0
    """Bytes of a micro-batch that go on to SSD."""
    window: Annotated[int, Field(ge=0)]
    """Tensors in flight between device and host at once; 0 waits for each."""
    swapped_bytes: Bytes
    """Bytes of a micro-batch that are offloaded."""
    step_s: tuple[float, float, float]
    """Seconds of a step as planned, with nothing offloaded, and with all of it."""

    @property
    def spilled(self) -> SpillSpec:
        """The blocks on SSD, and the number of tensors prefetched from there."""
        return SpillSpec(frozenset(self.on_ssd), self.read_prefetch)


class Lohan(Technique):
    """Uses host memory and both directions of the link to avoid as much recomputation as makes the step
    shorter.

    Every block runs again in backward, except for its swapped tensors: those that save the most recomputation
    per byte are offloaded first ("offloading benefit"). The number of bytes follows from what else the step
    asks of each resource, copies and updates of `offload.states` included: where backward waits for a drive,
    recomputation costs nothing and little is swapped. The step time is convex in the bytes swapped, so its
    minimum is found by bisection. Copies of one block overlap another block's compute in both directions
    (`window`); copies that cannot are priced as exposed, and nothing is swapped that makes a step longer.
    Between a block's forward and its backward only tensors that are too small to swap are resident. The other
    half of LoHan is `offload.states: {kind: lohan}`. `host_bytes` limits host memory: the rest is recomputed
    or, with `spill: ssd`, what the first blocks swap goes on to SSD as far as that still pays, given the
    drive's other work.
    """

    kind: Literal["lohan"] = "lohan"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (LohanPlan,)
    title: ClassVar[str] = "Swap what pays, recompute the rest"
    source: ClassVar[str] = (
        "Liao et al. 2024, LoHan: Low-Cost High-Performance Framework to Fine-Tune 100B Model on a Consumer"
        " GPU, arXiv:2403.06504, traffic-aware activation swapping"
    )
    paper: ClassVar[str] = "LoHan"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="tensor", eager_only=DISPATCH_MODE)

    host_bytes: Annotated[int, Field(ge=0)] | None = None
    """Most bytes of a micro-batch on the host; less recomputes or spills more. Default: as many as pay."""
    spill: Literal["none", "ssd"] = "none"
    """Destination of bytes beyond `host_bytes`, block by block; a few tensors at a time pass through host
    memory on top.
    """
    read_prefetch: Annotated[int, Field(ge=0, le=64)] = 3
    """Tensors read from SSD before backward asks for them; each takes its bytes of host memory."""
    window: Annotated[int, Field(ge=0, le=64)] | None = None
    """Tensors in flight at once, D2H in forward and prefetched in backward; each takes its bytes of device
    memory. Default: as many as a block swaps, so that copies overlap the whole block that computes; 0 waits
    for each. Spilled tensors are waited for.
    """
    min_bytes: Annotated[int, Field(ge=1)] = MIN_MOVED_BYTES
    """Smaller tensors are not swapped: a copy has a fixed cost."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        beyond = " and SSD" if self.spill == "ssd" else ""
        return f"moves activations to host memory{beyond} where that beats recomputing, recomputes the rest"

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse blocks that cannot run again or run several times, and those where recomputing is faster."""
        if (reason := cannot_recompute(program.step, target.compiled)) is not None:
            return reason
        if split_calls(program.step) is not program.step:
            return refusals.block_runs_again("recompute: {kind: full}")
        if (reason := conflict(self, target, "offload.activations")) is not None:
            return reason
        if self.spill == "ssd" and (reason := self._cannot_spill(program, target)) is not None:
            return reason
        if not any(option.moved for option in self._chosen(program, target)[0]):
            return Reason(
                "nothing in the blocks is faster to swap than to run again", "recompute: {kind: full}"
            )
        return None

    def _cannot_spill(self, program: Program, target: Target) -> Reason | None:
        if self.host_bytes is None:
            return Reason(
                "the amount of host memory is not given, so nothing spills",
                "host_bytes: the most bytes that may be on the host",
            )
        if program.stages is not None:
            return Reason("host memory of pipeline stages is not planned, so nothing spills", "spill: none")
        return no_directory(target)

    def plan(self, program: Program, target: Target) -> LohanPlan:
        options, choice, by_block = self._chosen(program, target)
        different, swapped = list(dict.fromkeys(options)), sum(by_block.values())
        on_ssd = spilled_blocks(by_block, self.host_bytes or 0) if self.spill == "ssd" else []
        best, none, everything = (
            round(choice.costs_s(count), 9) for count in (choice.count, 0, len(choice.parts))
        )
        return LohanPlan(
            options=tuple(OptionEntry(**option_fields(each)) for each in different),
            blocks=tuple(different.index(each) for each in options),
            on_ssd=tuple(on_ssd),
            read_prefetch=self.read_prefetch if on_ssd else 0,
            spilled_bytes=sum(by_block[block] for block in on_ssd),
            window=0 if on_ssd else self._window(program, options),
            swapped_bytes=swapped,
            step_s=(best, none, everything),
        )

    def rewrite(self, program: Program, plan: LohanPlan, target: Target) -> Program:
        """Return the program recomputed as planned; swapped tensors are offloaded and reloaded."""
        return rewrite_planned(program, plan, plan.spilled, plan.window)

    def apply(self, context: Context, plan: LohanPlan) -> None:
        """Claim both in the activation table."""
        claim_planned(context, plan, plan.spilled, plan.window)

    def explain(self, plan: LohanPlan) -> tuple[str, ...]:
        best, none, everything = (format_seconds(each) for each in plan.step_s)
        swapped = format_bytes(plan.swapped_bytes)
        if plan.spilled_bytes:
            swapped += f" ({format_bytes(plan.spilled_bytes)} of them on to SSD)"
        others = f"{none} with recomputation alone, {everything} with all swapped"
        return (f"{swapped} of activations are swapped in a micro-batch: {best} a step; {others}",)

    def record(self, target: Target) -> dict[str, Any]:
        knobs = {"swapped": "least seconds", "host_bytes": self.host_bytes, "min_bytes": self.min_bytes}
        knobs |= {"window": self.window}
        knobs |= {"spill": self.spill, "read_prefetch": self.read_prefetch} if self.spill != "none" else {}
        return {"activations.recompute": knobs}

    def _window(self, program: Program, options: list[Option]) -> int:
        if (
            program.stages is not None
        ):  # several micro-batches are in flight, and the last one out is not the next one back
            return 0
        return _most_moved(program.step, options) if self.window is None else self.window

    def _chosen(self, program: Program, target: Target) -> tuple[list[Option], SwapChoice, dict[int, int]]:
        later, run = later_techniques(target), (program.ranks, program.micro_batch, program.accumulate)
        inputs = (
            program.step,
            later,
            target.hardware,
            *run,
            self.host_bytes,
            self.min_bytes,
            self.spill == "ssd",
        )
        # There each copy is waited for, so all of its time is added to compute.
        if self.spill == "ssd" or program.stages is not None or self.window == 0:
            return _solved(*inputs, True)
        # The window follows from the plan and the plan from the window: a narrow one is solved again with
        # waits.
        found = _solved(*inputs, False)
        if self.window is None or self.window >= _most_moved(program.step, found[0]):
            return found
        return _solved(*inputs, True)


def _most_moved(step: Step, options: list[Option]) -> int:
    """Return the largest number of tensors that a block swaps; one block of each option is examined."""
    outputs = np.bincount(step.storages.producer[step.storages.producer >= 0], minlength=step.ops.n)
    forward, most = step.ops.phase == Phase.FORWARD, 0
    for option in dict.fromkeys(options):
        block = options.index(option)
        ops = np.flatnonzero(forward & (step.ops.block == block)).astype(np.int32)
        made = sum(int(outputs[op]) for op, _, call in calls_of(step, ops) if call in option.moved)
        most = max(
            most,
            made + (int(np.count_nonzero(step.calls.input_block == block)) if INPUTS in option.moved else 0),
        )
    return most


@lru_cache(maxsize=256)
def _points(ops: tuple[tuple[Any, ...], ...], min_bytes: int) -> tuple[Combination, ...]:
    """Return the hull of a block described by `_facts`, cached for equal blocks of all candidates."""
    made = tuple(
        BlockOp(name, seconds, reads, size, saved, keepable, is_input=is_input)
        for name, seconds, reads, size, saved, keepable, is_input in ops
    )
    return tuple(hull(made, combinations(made, _LIMIT), min_bytes))


def _facts(ops: tuple[BlockOp, ...]) -> tuple[tuple[Any, ...], ...]:
    """Return a hashable description of a block whose tensors are not offloaded yet."""
    return tuple((op.name, op.seconds, op.reads, op.bytes, op.saved, op.keepable, op.is_input) for op in ops)


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Swap options of the blocks of one step, independent of later techniques."""

    full: Step
    """The step with every block recomputed."""
    graphs: Mapping[int, Block]
    hulls: Mapping[int, tuple[Combination, ...]]
    swapped_bytes: Mapping[int, tuple[int, ...]]
    """Bytes swapped at each point of the hulls."""
    parts: tuple[Part, ...]
    options: dict[tuple[int, int], Option] = field(default_factory=dict)
    """Options by block and number of parts, filled on demand."""

    def option(self, step: Step, block: int, taken: int) -> Option:
        """Return the option of `block` of `step` with `taken` of its parts swapped."""
        if block not in self.graphs:
            return FULL
        known = self.options.get((block, taken))
        if known is None:
            known = self.options[block, taken] = to_option(step, self.graphs[block], self.hulls[block][taken])
        return known


@lru_cache(maxsize=16)
def _blocks(step: Step, hardware: Hardware, ranks: int, min_bytes: int) -> _Blocks:
    """Return the swap options of `step`, cached for all candidates that begin with it."""
    seconds = op_seconds(step, hardware, ranks)
    graphs = dict(zip(step.calls.block.tolist(), block_graphs(step), strict=True))
    made = {block: block_ops(step, graph, seconds, None) for block, graph in graphs.items()}
    # Equal blocks have equal facts, so each kind of block is solved once for all candidates.
    hulls = {block: _points(_facts(ops), min_bytes) for block, ops in made.items()}
    swapped = {
        block: tuple(bytes_of(made[block], point) for point in points) for block, points in hulls.items()
    }
    parts = tuple(part for block, points in hulls.items() for part in parts_of(block, made[block], points))
    return _Blocks(apply_options(step, [FULL] * len(step.blocks)), graphs, hulls, swapped, parts)


@lru_cache(maxsize=64)
def _solved(
    step: Step,
    techniques: tuple[Technique, ...],
    hardware: Hardware,
    ranks: int,
    micro_batch: int,
    accumulate: int,
    host_bytes: int | None,
    min_bytes: int,
    spill: bool,
    waits: bool,
) -> tuple[list[Option], SwapChoice, dict[int, int]]:
    """Return each block's option, the choice, and the swapped bytes; cached for `fits` and `plan`."""
    blocks = _blocks(step, hardware, ranks, min_bytes)
    full = Program((RankClass(ranks, blocks.full),), micro_batch, accumulate)
    # Copies and updates of `offload.states` take their share of link and host before anything is swapped.
    later = apply_later_passes(full, techniques, hardware)
    fixed = sum(each[0] for each in blocks.swapped_bytes.values())
    choice = SwapChoice.fastest(
        blocks.parts, busy_seconds(later, hardware), hardware, fixed, host_bytes, spill=spill, waits=waits
    )
    taken = choice.swapped_parts()
    options = [blocks.option(step, block, taken[block]) for block in range(len(step.blocks))]
    return options, choice, {block: each[taken[block]] for block, each in blocks.swapped_bytes.items()}
