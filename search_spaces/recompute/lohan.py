"""Swap as many bytes of activations as pay, recompute the rest (LoHan, Liao et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from memtune.effects import DISPATCH_MODE, Effects
from memtune.hardware import Hardware
from memtune.program import INPUTS, Phase, Program, RankClass, Step, calls_of, split_calls
from memtune.runtime import Context
from memtune.search_spaces._plan_fields import Bytes, Index
from memtune.search_spaces._support import conflict
from memtune.search_spaces.recompute._block_planner import (
    FULL,
    MIN_MOVED_BYTES,
    Block,
    Choice,
    Combination,
    Made,
    Option,
    OptionEntry,
    OptionsPlan,
    Part,
    Spilled,
    after_later,
    as_planned,
    block_graphs,
    busy_in,
    bytes_of,
    claim_planned,
    combinations,
    fields_of,
    hull,
    later_techniques,
    made_in,
    op_seconds,
    option_of,
    parts_of,
    rewritten,
    spilled_blocks,
    why_not,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique, no_directory
from memtune.units import format_bytes, format_seconds

_LIMIT = 64
"""Combinations of a block that its hull is taken from."""


class LohanPlan(OptionsPlan):
    """What each block runs again and offloads, what of that goes on to SSD, and the seconds that were
    weighed.
    """

    on_ssd: tuple[Index, ...] = ()
    """Blocks whose offloaded tensors go on from the host to SSD."""
    ahead: Annotated[int, Field(ge=0)] = 0
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
    def spilled(self) -> Spilled:
        """The blocks on SSD, and how far ahead they are read."""
        return Spilled(frozenset(self.on_ssd), self.ahead)


class Lohan(Technique):
    """Trades host memory and both directions of the link for as much recomputation as that makes the step
    shorter.

    Every block runs again in backward, but for what is swapped: tensors that save the most recomputation per
    byte go to the host first ("offloading benefit"). How many bytes follows from what else the step asks of
    each resource, copies and updates of `offload.states` included: where backward waits for a drive,
    recomputation costs nothing and little is swapped. That time is convex in the bytes swapped, so its
    minimum is found by bisection. Copies of one block run beside another's compute, both ways (`window`);
    where they cannot they are priced as waited for, and nothing is swapped that makes a step longer. Nothing
    stays on the device between a block's forward and its backward but what is too small to move. The other
    half of LoHan is `offload.states: {kind: lohan}`. Where host memory is short, `host_bytes` says so: the
    rest runs again or, with `spill: ssd`, what the first blocks swap goes on to SSD as far as that still
    pays, with what else the drive has to do.

    Distinguishing test: the number of bytes is that of the least time over all numbers (brute force), it
    grows with the link's speed, and it shrinks when a drive makes backward wait; what is spilled is written
    once and read once; a block's tensors are on their way back before the block after it has run backward.
    """

    kind: Literal["lohan"] = "lohan"
    slot: ClassVar[str] = "recompute"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (LohanPlan,)
    title: ClassVar[str] = "Swap what pays, recompute the rest"
    source: ClassVar[str] = (
        "Liao et al. 2024, LoHan: Low-Cost High-Performance Framework to Fine-Tune 100B Model on a Consumer"
        " GPU, arXiv:2403.06504, traffic-aware activation swapping"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="tensor", eager_only=DISPATCH_MODE)

    host_bytes: Annotated[int, Field(ge=0)] | None = None
    """Most that a micro-batch may put on the host; less recomputes more, or spills. Left out: as much as
    pays.
    """
    spill: Literal["none", "ssd"] = "none"
    """Where what `host_bytes` has no room for goes, block by block; a few tensors at a time pass through host
    memory on top.
    """
    ahead: Annotated[int, Field(ge=0, le=64)] = 3
    """Tensors read from SSD before backward asks for them; each takes its bytes of host memory."""
    window: Annotated[int, Field(ge=0, le=64)] | None = None
    """Tensors on their way at once, out in forward, and back ahead of backward; each takes its bytes of
    device memory. Left out: as many as a block swaps, so that copies run beside the whole block that
    computes; 0 waits for each. What spills waits.
    """
    min_bytes: Annotated[int, Field(ge=1)] = MIN_MOVED_BYTES
    """Smaller tensors stay on the device: a copy has a fixed cost."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks that run once and can run again, and something in them that is faster to swap."""
        if (reason := why_not(program.step, target.compiled)) is not None:
            return reason
        if split_calls(program.step) is not program.step:
            return Reason(
                "a block runs several times, and its tensors have no addresses", "recompute: {kind: full}"
            )
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
                "nothing says how much host memory there is, so nothing spills",
                "host_bytes: what may lie there",
            )
        if program.stages is not None:
            return Reason(
                "what the host of each stage has room for is not planned, so nothing spills", "spill: none"
            )
        return no_directory(target)

    def plan(self, program: Program, target: Target) -> LohanPlan:
        """What each block runs again, what it swaps and what of that goes on to SSD, with the seconds that
        were weighed.
        """
        options, choice, by_block = self._chosen(program, target)
        different, swapped = list(dict.fromkeys(options)), sum(by_block.values())
        on_ssd = spilled_blocks(by_block, self.host_bytes or 0) if self.spill == "ssd" else []
        best, none, everything = (
            round(choice.costs_s(count), 9) for count in (choice.count, 0, len(choice.parts))
        )
        return LohanPlan(
            options=tuple(OptionEntry(**fields_of(each)) for each in different),
            blocks=tuple(different.index(each) for each in options),
            on_ssd=tuple(on_ssd),
            ahead=self.ahead if on_ssd else 0,
            spilled_bytes=sum(by_block[block] for block in on_ssd),
            window=0 if on_ssd else self._window(program, options),
            swapped_bytes=swapped,
            step_s=(best, none, everything),
        )

    def rewrite(self, program: Program, plan: LohanPlan, target: Target) -> Program:
        """Every block runs again as far as the plan says; what is swapped leaves in forward and comes back in
        backward.
        """
        return as_planned(program, plan, plan.spilled, plan.window)

    def apply(self, context: Context, plan: LohanPlan) -> None:
        """Claim both in the activation table."""
        claim_planned(context, plan, plan.spilled, plan.window)

    def explain(self, plan: LohanPlan) -> tuple[str, ...]:
        """The bytes, and the seconds against swapping nothing and all."""
        best, none, everything = (format_seconds(each) for each in plan.step_s)
        swapped = format_bytes(plan.swapped_bytes)
        if plan.spilled_bytes:
            swapped += f" ({format_bytes(plan.spilled_bytes)} of them on to SSD)"
        others = f"{none} with recomputation alone, {everything} with all swapped"
        return (f"{swapped} of activations are swapped in a micro-batch: {best} a step; {others}",)

    def record(self, target: Target) -> dict[str, Any]:
        """What decides."""
        how = {"swapped": "least seconds", "host_bytes": self.host_bytes, "min_bytes": self.min_bytes}
        how |= {"window": self.window}
        how |= {"spill": self.spill, "ahead": self.ahead} if self.spill != "none" else {}
        return {"activations.recompute": how}

    def _window(self, program: Program, options: list[Option]) -> int:
        if (
            program.stages is not None
        ):  # several micro-batches are in flight, and the last one out is not the next one back
            return 0
        return _most_moved(program.step, options) if self.window is None else self.window

    def _chosen(self, program: Program, target: Target) -> tuple[list[Option], Choice, dict[int, int]]:
        later, run = later_techniques(target), (program.ranks, program.micro_batch, program.accumulate)
        how = (
            program.step,
            later,
            target.hardware,
            *run,
            self.host_bytes,
            self.min_bytes,
            self.spill == "ssd",
        )
        if self.spill == "ssd" or program.stages is not None or self.window == 0:
            return _solved(*how, True)
        found = _solved(*how, False)
        if self.window is None or self.window >= _most_moved(program.step, found[0]):
            return found
        return _solved(*how, True)


def _most_moved(step: Step, options: list[Option]) -> int:
    """Tensors that the block with the most of them swaps; one block of each option is looked at."""
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
    """The hull of a block that `_facts` tells of: equal blocks, also those of other candidates, share it."""
    made = tuple(
        Made(name, seconds, reads, size, saved, keepable, given=given)
        for name, seconds, reads, size, saved, keepable, given in ops
    )
    return tuple(hull(made, combinations(made, _LIMIT), min_bytes))


def _facts(ops: tuple[Made, ...]) -> tuple[tuple[Any, ...], ...]:
    """All that is known of a block whose tensors nothing moves yet; can be hashed."""
    return tuple((op.name, op.seconds, op.reads, op.bytes, op.saved, op.keepable, op.given) for op in ops)


@dataclass(frozen=True, eq=False)
class _Blocks:
    """What the blocks of one step may swap, whatever techniques come later."""

    full: Step
    """Every block runs again."""
    graphs: Mapping[int, Block]
    hulls: Mapping[int, tuple[Combination, ...]]
    swapped_bytes: Mapping[int, tuple[int, ...]]
    """Of each point of the hulls."""
    parts: tuple[Part, ...]
    options: dict[tuple[int, int], Option] = field(default_factory=dict)
    """By block and number of parts, as far as they were asked for."""

    def option(self, step: Step, block: int, taken: int) -> Option:
        """What `block` of `step` does with so many of its parts swapped."""
        if block not in self.graphs:
            return FULL
        known = self.options.get((block, taken))
        if known is None:
            known = self.options[block, taken] = option_of(step, self.graphs[block], self.hulls[block][taken])
        return known


@lru_cache(maxsize=16)
def _blocks(step: Step, hardware: Hardware, ranks: int, min_bytes: int) -> _Blocks:
    """Found once for all candidates that begin with `step`."""
    seconds = op_seconds(step, hardware, ranks)
    graphs = dict(zip(step.calls.block.tolist(), block_graphs(step), strict=True))
    made = {block: made_in(step, graph, seconds, None) for block, graph in graphs.items()}
    hulls = {block: _points(_facts(ops), min_bytes) for block, ops in made.items()}
    swapped = {
        block: tuple(bytes_of(made[block], point) for point in points) for block, points in hulls.items()
    }
    parts = tuple(part for block, points in hulls.items() for part in parts_of(block, made[block], points))
    return _Blocks(rewritten(step, [FULL] * len(step.blocks)), graphs, hulls, swapped, parts)


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
) -> tuple[list[Option], Choice, dict[int, int]]:
    """The option of every block, the choice, and the bytes that each swaps; `fits` and `plan` both ask for
    it.
    """
    blocks = _blocks(step, hardware, ranks, min_bytes)
    full = Program((RankClass(ranks, blocks.full),), micro_batch, accumulate)
    later = after_later(full, techniques, hardware)
    fixed = sum(each[0] for each in blocks.swapped_bytes.values())
    choice = Choice.of(
        blocks.parts, busy_in(later, hardware), hardware, fixed, host_bytes, spill=spill, waits=waits
    )
    taken = choice.taken()
    options = [blocks.option(step, block, taken[block]) for block in range(len(step.blocks))]
    return options, choice, {block: each[taken[block]] for block, each in blocks.swapped_bytes.items()}
