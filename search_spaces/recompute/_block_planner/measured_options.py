"""The options of the blocks of a program, measured on the program by the passes that will apply them.

Equal blocks share their options. A *level* is one option for every block. The step is rewritten once per
level, and the bytes that each block holds and needs, and its seconds, are read from the live bytes of the
result, so plans are priced by what the passes predict.

Mechanisms cost host seconds as well. A block that the activation table claims pays for its second run's
bookkeeping and for a hook on each tensor that autograd saves in it; if it keeps outputs or offloads chosen
ones, also for a dispatch mode that sees each op of it, views included. A schedule runs generated code
instead: it pays for each call and for each parameter's gradient, and nothing for an op. The constants are
those of `Hardware`. On a GPU the host issues ops ahead of the device, so its work costs time only in a step
whose ops are shorter than their issue.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from memtune.activations.offload import OffloadClaim, move_activations
from memtune.activations.recompute import recompute_blocks
from memtune.hardware import Hardware, op_costs
from memtune.program import (
    F64,
    FOREVER,
    I32,
    I64,
    INPUTS,
    OFFLOAD,
    SPILL,
    Kind,
    OpAddress,
    OpAddresses,
    Phase,
    Program,
    RankClass,
    Resource,
    Step,
    Tier,
    calls_of,
    forward_and_backward,
    split_calls,
)
from memtune.search_spaces.recompute._block_planner.call_selection import (
    Block,
    block_graphs,
    calls_for,
    core_attention,
    inputs_of_products,
)
from memtune.search_spaces.recompute._block_planner.fits import is_attention, is_matmul_or_attention
from memtune.search_spaces.recompute._block_planner.frontier import Problem
from memtune.search_spaces.recompute._block_planner.tensor_options import (
    Action,
    BlockOp,
    Combination,
    combinations,
    keep_only,
)
from memtune.technique import Target, Technique

_WITH_VIEWS = 3
"""Ops that a dispatch mode sees for each op of a Step, in which views are dropped."""


class Claims(Protocol):
    """Claims of the activation table on a block."""

    @property
    def calls(self) -> OpAddresses | None:
        """Calls that a second run keeps and skips; None without one."""

    @property
    def moved(self) -> frozenset[OpAddress]:
        """Calls whose outputs are offloaded."""


def claims_s(step: Step, block: int, claims: Claims, hardware: Hardware) -> float:
    """Return the host seconds that `claims` on row `block` of the plain step add to a micro-batch."""
    if (claims.calls is None and not claims.moved) or not is_host_visible(step, hardware):
        return 0.0
    ops, saved = (int(counts[block]) for counts in _counts(step))
    found = hardware.recomputed_block_s + saved * hardware.saved_tensor_s
    if claims.calls is not None and claims.calls != OpAddresses():
        found += 2 * _WITH_VIEWS * ops * hardware.observed_op_s
    if claims.moved:
        found += _WITH_VIEWS * ops * hardware.observed_op_s + len(claims.moved) * hardware.moved_tensor_s
    return found


def schedule_s(step: Step, calls: int, hardware: Hardware) -> float:
    """Return the host seconds that schedules, run `calls` times a micro-batch, add to `step`."""
    # Its ops take no longer than in the plain model: generated code calls them below autograd.
    if not is_host_visible(step, hardware):
        return 0.0
    gradients = int((step.storages.kind == Kind.PARAMETER).sum())
    return calls * hardware.scheduled_call_s + gradients * hardware.scheduled_gradient_s


@lru_cache(maxsize=16)
def is_host_visible(step: Step, hardware: Hardware) -> bool:
    """Return whether work of the host takes time: on CPU always, on a GPU if ops mostly wait for it."""
    if hardware.device == "cpu":
        return True
    costs = op_costs(step, hardware)
    return float(costs.issue_s.sum()) > float(costs.op_s.sum())


@lru_cache(maxsize=16)
def _counts(step: Step) -> tuple[I64, I64]:
    """Return the (blocks,) number of forward ops of each block and of the tensors that it saves."""
    in_blocks = (
        (step.ops.block >= 0) & (step.ops.phase == Phase.FORWARD) & (step.ops.resource == Resource.COMPUTE)
    )
    blocks = len(step.blocks)
    ops = np.bincount(step.ops.block[in_blocks], minlength=blocks)
    saved = np.bincount(step.saves.block[step.saves.block >= 0], minlength=blocks)
    return ops.astype(np.int64), saved.astype(np.int64)


LIMIT = 26
"""Largest number of options of a block."""
_OTHERS = 5
"""Number of techniques among a block's options: attention_output, selective, balanced, core, full."""
MIN_MOVED_BYTES = 65536
"""Smaller tensors are not offloaded: a copy has a fixed cost."""


@dataclass(frozen=True)
class Option:
    """Calls that a block recomputes and offloads between its forward and its backward."""

    calls: OpAddresses | None
    """Calls that its second run keeps and skips; None: the block does not run again."""
    moved: frozenset[OpAddress] = frozenset()
    """Calls whose outputs are offloaded to the host."""
    again: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    """Names and counts of the ops that run a second time, for display."""


PLAIN = Option(None)
FULL = Option(OpAddresses())
"""The whole block runs again: never the fastest for its bytes, but a plan can then do what `full` does."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Largest live bytes of a step in each window that its blocks cut it into."""

    forward: I64
    """(blocks,) up to the end of each block's forward."""
    after: int
    """Between the last block's forward and its backward."""
    backward: I64
    """(blocks,) up to the end of each block's backward, which run in reverse order."""
    rest: int

    @property
    def peak_bytes(self) -> int:
        """Largest live bytes of the whole step."""
        return max(int(self.forward.max(initial=0)), self.after, int(self.backward.max(initial=0)), self.rest)


@dataclass(frozen=True, eq=False)
class Levels:
    """Options of every block of one step with their bytes and seconds, (blocks, options) each."""

    step: Step
    order: I32
    """(blocks,) rows of `step.blocks` in the order in which they run; it orders all other arrays."""
    options: tuple[tuple[Option, ...], ...]
    """By class of equal blocks; the first option of each keeps everything."""
    class_of: I32
    """(blocks,) class of each block."""
    plain: Moments
    held_bytes: I64
    forward_bytes: I64
    backward_bytes: I64
    after_bytes: int
    seconds: F64
    uniform: tuple[tuple[int, float], ...] = ()
    """Peak and seconds of each level, if blocks overlap in time and must all take the same level; else empty.
    """
    claims_s: F64 | None = None
    """(blocks, options) part of the seconds that the host spends on hooks and modes."""
    others: tuple[I32, ...] = ()
    """Plans of other techniques: each decision for all blocks, and full recompute of one block in n."""

    def problem(self, now: Moments | None = None) -> Problem:
        """Return the planner's problem; `now` are the windows of the plain step after the later passes."""
        now = now or self.plain
        if self.uniform:
            peaks, seconds = (np.asarray(column) for column in zip(*self.uniform, strict=True))
            more = now.peak_bytes - self.plain.peak_bytes
            return Problem(
                np.zeros((1, len(peaks)), np.int64),
                peaks[None] + more,
                seconds[None],
                np.zeros(1, np.int32),
                0,
                0,
            )
        forward = self.forward_bytes + (now.forward - self.plain.forward)[:, None]
        backward = self.backward_bytes + (now.backward - self.plain.backward)[:, None]
        after = self.after_bytes + now.after - self.plain.after
        return Problem(
            self.held_bytes, np.maximum(forward, backward), self.seconds, self.class_of, after, now.rest
        )

    def chosen(self, choice: I32) -> list[Option]:
        """Return the option of each of `step.blocks` for a solution of `problem`."""
        if self.uniform:
            choice = np.repeat(choice, len(self.class_of))
        by_class = [self.options[each] for each in self.class_of.tolist()]
        found = [
            options[min(i, len(options) - 1)] for options, i in zip(by_class, choice.tolist(), strict=True)
        ]
        return [found[place] for place in np.argsort(self.order).tolist()]


def apply_options(step: Step, chosen: list[Option]) -> Step:
    """Return `step` with its blocks recomputed and their tensors offloaded as chosen."""
    again = [i for i, option in enumerate(chosen) if option.calls is not None]
    new = (
        recompute_blocks(step, again, [option.calls or OpAddresses() for option in chosen]) if again else step
    )
    return move_activations(new, offload_claims(chosen))


def offload_claims(chosen: list[Option], on_ssd: frozenset[int] = frozenset()) -> list[OffloadClaim]:
    """Return the blocks' offload claims; tensors of blocks `on_ssd` go on from host to SSD."""
    return [
        OffloadClaim(i, 1.0, only=option.moved, policy=SPILL if i in on_ssd else OFFLOAD)
        for i, option in enumerate(chosen)
        if option.moved
    ]


@lru_cache(maxsize=8)
def levels(
    step: Step, hardware: Hardware, ranks: int, host: bool, offload: Technique | None = None
) -> Levels:
    """Return the measured options of every block of `step`; with `host`, tensors may be offloaded to the
    host.

    `offload` is a technique that offloads a fixed fraction of each block: options are measured on what it
    leaves.
    """
    split = split_calls(step)
    links = (
        hardware if host and split is step else None
    )  # calls of a block that runs several times have no addresses, so nothing is offloaded
    seconds = op_seconds(step, hardware, ranks)
    calls = zip(block_graphs(split), step.calls.block.tolist(), step.calls.grad_enabled.tolist(), strict=True)
    blocks = {
        block: graph for graph, block, seen in reversed(list(calls)) if seen
    }  # a call under no_grad saves nothing: no decision
    order = np.argsort(_ends(step)[0], kind="stable").astype(np.int32)
    options: list[tuple[Option, ...]] = []
    others: list[tuple[int, ...]] = []
    known: dict[object, int] = {}
    class_of = []
    for block in order.tolist():
        graph = blocks.get(block)
        ops = () if graph is None else block_ops(split, graph, seconds, links)
        # By what the planner sees, not by module class: blocks that differ in names alone share options.
        key = tuple(
            (op.name, op.reads, op.bytes, op.saved, op.keepable, op.is_input, round(op.seconds, 12))
            for op in ops
        )
        if key not in known:
            known[key] = len(options)
            counted, theirs = _options(split, graph, ops)
            options.append(counted)
            others.append(theirs)
        class_of.append(known[key])
    found = _measured(step, order, tuple(options), np.asarray(class_of, np.int32), hardware, ranks, offload)
    # Blocks that overlap in time cut the step into no windows, so only levels for all are priced.
    if split is not step or not _in_order(step, order):
        return found
    return replace(found, uniform=(), others=_other_plans(order, np.asarray(others, np.int32)[class_of]))


def _other_plans(order: I32, others: I32) -> tuple[I32, ...]:
    """Return plans of all blocks from the (blocks, others) options that other techniques would choose."""
    one_in = [np.where(order % n == 0, others[:, -1], 0).astype(np.int32) for n in (2, 3, 4)]
    return (*others.T, *one_in)


def _options(
    step: Step, block: Block | None, ops: tuple[BlockOp, ...]
) -> tuple[tuple[Option, ...], tuple[int, ...]]:
    """Return the options of a block, and for each other technique the option that it would choose."""
    if block is None:
        return (PLAIN,), (0,) * _OTHERS
    known = [
        frozenset(i for i, op in enumerate(ops) if keeps(op.name))
        for keeps in (is_attention, is_matmul_or_attention)
    ]
    others = [to_option(step, block, keep_only(ops, each)) for each in known]
    for again in (inputs_of_products(block), core_attention(block)):
        frees = block.saved & {s for op in again for s in block.makes[op]}
        others.append(
            Option(calls_for(step, block, again), again=_op_counts(block, again)) if frees else PLAIN
        )
    # Without saves nothing would be freed, and the block would run twice for nothing.
    others.append(FULL if block.saved else PLAIN)
    priced = [to_option(step, block, each) for each in combinations(ops, LIMIT - _OTHERS - 1, known)]
    found = tuple(dict.fromkeys([PLAIN, *priced, *others]))
    return found, tuple(found.index(each) for each in others)


def to_option(step: Step, block: Block, combination: Combination) -> Option:
    """Return `combination` as an option of `block`. Op 0 of a combination represents the block's inputs."""
    again = {block.ops[i - 1] for i in combination.again}
    ops = np.asarray(block.ops, np.int32)
    address = (
        dict(zip(block.ops, (call for _, _, call in calls_of(step, ops)), strict=True))
        if combination.moved
        else {}
    )
    moved = frozenset(address[block.ops[i - 1]] if i else INPUTS for i in combination.moved)
    return Option(calls_for(step, block, again) if again else None, moved, _op_counts(block, again))


def _op_counts(block: Block, again: set[int]) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(block.name[op] for op in sorted(again)).items())


def block_ops(step: Step, block: Block, op_s: F64, links: Hardware | None) -> tuple[BlockOp, ...]:
    """Return `block`'s inputs and forward ops as the planner sees them; no offload without `links`."""
    place = {op: i for i, op in enumerate(block.ops, start=1)}
    bytes_of = _bytes_of(step)
    entered = {
        s
        for s in step.calls.inputs.storage[step.calls.input_block == block.index].tolist()
        if step.storages.held_until[s] != FOREVER
    }
    entered = {s for s in entered if s not in block.producer and step.storages.producer[s] >= 0}
    needed = bool(entered.intersection(step.saves.storage[step.saves.block == block.index].tolist()))
    n_bytes = sum(map(bytes_of.__getitem__, entered))
    found = [
        BlockOp("inputs", 0.0, (), n_bytes, needed, bool(entered), _offload_s(n_bytes, links), is_input=True)
    ]
    for op in block.ops:
        saved = [s for s in block.makes[op] if s in block.saved]
        is_expensive = is_matmul_or_attention(block.name[op])
        reads = {place[block.producer[s]] for s in block.reads[op] if s in block.producer} - {place[op]}
        reads |= {0} if entered.intersection(block.reads[op]) else set()
        n_bytes = sum(map(bytes_of.__getitem__, saved or block.makes[op])) if saved or is_expensive else 0
        # A value written in place later would be kept in its changed state.
        keepable = bool(saved or is_expensive) and op not in block.spoiled
        offload_s = _offload_s(n_bytes, links)
        found.append(
            BlockOp(
                block.name[op],
                float(op_s[op]),
                tuple(sorted(reads)),
                n_bytes,
                bool(saved),
                keepable,
                offload_s,
            )
        )
    return tuple(found)


@lru_cache(maxsize=2)
def _bytes_of(step: Step) -> list[int]:
    found: list[int] = step.storages.bytes.tolist()
    return found


def _offload_s(n_bytes: int, links: Hardware | None) -> dict[Action, float]:
    """Return the seconds that offloading adds: those of the reload, which backward waits for."""
    # The D2H copy overlaps the rest of forward; `_measured` sees where it does not.
    if links is None or n_bytes < MIN_MOVED_BYTES:
        return {}
    return {Action.HOST: n_bytes / links.host_to_device_bytes_per_s + links.launch_s}


def _measured(
    step: Step,
    order: I32,
    options: tuple[tuple[Option, ...], ...],
    class_of: I32,
    hardware: Hardware,
    ranks: int,
    offload: Technique | None,
) -> Levels:
    n_levels = max(map(len, options), default=1)
    shape = len(order), n_levels
    held, forward, backward = (np.zeros(shape, np.int64) for _ in range(3))
    seconds, after, uniform = np.zeros(shape), [], []
    plain = moments(_with_offload(step, offload, hardware), order, hardware)
    first = forward_and_backward(step)
    rest = int(live_bytes(step, hardware)[first.ops.n :].max(initial=0))
    found = Levels(
        step=step,
        order=order,
        options=options,
        class_of=class_of,
        plain=plain,
        held_bytes=held,
        forward_bytes=forward,
        backward_bytes=backward,
        after_bytes=0,
        seconds=seconds,
        uniform=((0, 0.0),),
    )
    for level in range(n_levels):
        # All blocks take the same option in a level: each is priced between equal neighbours.
        new = _with_offload(
            apply_options(first, found.chosen(np.asarray([level], np.int32))), offload, hardware
        )
        # Level 0 holds the absolute seconds until the end of the loop; the others are differences from it.
        seconds[:, level] = _seconds(new, op_seconds(new, hardware, ranks))[order] - seconds[:, 0] * (
            level > 0
        )
        now = moments(new, order, hardware)
        uniform.append((max(now.peak_bytes, rest), float(seconds[:, level].sum()) * (level > 0)))
        held[:, level] = held_bytes(new, order, hardware)
        # Without what earlier blocks hold: the frontier adds that, for the options which they take.
        before = np.cumsum(held[:, level]) - held[:, level]
        forward[:, level], backward[:, level] = now.forward - before, now.backward - before
        after.append(now.after - int(held[:, level].sum()))
    seconds[:, 0] = 0.0  # the user's own checkpoints run in any case
    costs = _claims_s(found, hardware)
    seconds += costs
    uniform = [(peak, s + float(costs[:, i].sum())) for i, (peak, s) in enumerate(uniform)]
    # Equal in theory for all levels; the median is robust to one with a peak elsewhere.
    return replace(found, after_bytes=int(np.median(after)), uniform=tuple(uniform), claims_s=costs)


def _claims_s(found: Levels, hardware: Hardware) -> F64:
    """Return the (blocks, levels) host seconds of each option's claims; equal blocks have equal ones."""
    _, first = np.unique(found.class_of, return_index=True)
    levels = found.seconds.shape[1]
    by_class = np.asarray(
        [
            [claims_s(found.step, block, options[min(i, len(options) - 1)], hardware) for i in range(levels)]
            for block, options in zip(found.order[first].tolist(), found.options, strict=True)
        ]
    ).reshape(len(found.options), levels)
    return by_class[found.class_of]


def _with_offload(step: Step, offload: Technique | None, hardware: Hardware) -> Step:
    """Return `step` after the pass of `offload`."""
    if offload is None:
        return step
    program, target = Program((RankClass(1, step),), 1), Target(hardware, chosen={offload.slot: offload})
    return offload.rewrite(program, offload.plan(program, target), target).step


def op_seconds(step: Step, hardware: Hardware, ranks: int) -> F64:
    """Return (n,) seconds of each row of `step.ops`: the predicted time of every op of the program.

    On its resource by `memtune.hardware.roofline`, or as measured by trials; an op shorter than its launch
    costs the host the launch time. Rows of a `Block`'s ops are rows of this array, so a policy by time is
    `{op for op in block.ops if op_seconds(...)[op] < limit_s}`.

    Args:
        step: Recorded or rewritten.
        hardware: Gives rates and launch times.
        ranks: Number of ranks, for collectives.
    """
    costs = op_costs(step, hardware, ranks=ranks)
    # A short op is over before the host has issued the next one.
    found: F64 = np.maximum(costs.op_s, costs.issue_s)
    return found


def _seconds(step: Step, op_s: F64) -> F64:
    """Return (blocks,) seconds of recompute and waits: H2D copies, and D2H copies beyond forward."""
    inside = step.ops.block >= 0

    def total(ops: npt.NDArray[np.bool_]) -> F64:
        counted = inside & ops
        found: F64 = np.bincount(step.ops.block[counted], op_s[counted], len(step.blocks)).astype(np.float64)
        return found

    computes = step.ops.resource == Resource.COMPUTE
    forward = total(computes & (step.ops.phase == Phase.FORWARD))
    out = total((step.ops.resource == Resource.DEVICE_TO_HOST) & (step.ops.phase == Phase.FORWARD))
    waits = total(step.ops.resource == Resource.HOST_TO_DEVICE)
    found: F64 = (
        total(computes & (step.ops.phase == Phase.RECOMPUTE)) + waits + np.maximum(out - forward, 0.0)
    )
    return found


def live_bytes(step: Step, hardware: Hardware) -> I64:
    """Return the (n,) live device bytes as the allocator counts them."""
    rounding = hardware.allocation_rounding_bytes
    counted = np.flatnonzero(step.storages.tier == Tier.DEVICE)
    # torch's allocator rounds each request up (512 bytes on CUDA), so many small tensors cost more.
    n_bytes = -(-step.storages.bytes[counted] // rounding) * rounding
    delta = np.zeros(step.ops.n + 1, np.int64)
    np.add.at(delta, np.maximum(step.storages.producer[counted], 0), n_bytes)
    np.add.at(delta, np.minimum(step.freed_after[counted], step.ops.n - 1) + 1, -n_bytes)
    return np.cumsum(delta[:-1])


@lru_cache(maxsize=2)
def _ends(step: Step) -> tuple[I32, I32]:
    """Return (blocks,) the last forward and the last backward op of each block, -1 if there is none."""
    n_blocks = len(step.blocks)
    forward, backward = np.full(n_blocks, -1, np.int32), np.full(n_blocks, -1, np.int32)
    rows = np.flatnonzero((step.ops.block >= 0) & (step.ops.phase == Phase.FORWARD))
    forward[step.ops.block[rows]] = rows
    rows = np.flatnonzero(
        (step.ops.block >= 0) & ((step.ops.phase == Phase.BACKWARD) | (step.ops.phase == Phase.RECOMPUTE))
    )
    backward[step.ops.block[rows]] = rows
    return forward, backward


def _in_order(step: Step, order: I32) -> bool:
    forward, backward = (ends[order] for ends in _ends(step))
    return bool((np.diff(forward) > 0).all() and (np.diff(backward[backward >= 0]) < 0).all())


def moments(step: Step, order: I32, hardware: Hardware) -> Moments:
    """Return the largest live bytes in each window of `step`, whose blocks run in `order`."""
    most, n_blocks = np.maximum.reduceat(live_bytes(step, hardware), windows(step, order)), len(order)
    return Moments(most[:n_blocks], int(most[n_blocks]), most[n_blocks + 1 : -1][::-1], int(most[-1]))


def windows(step: Step, order: I32) -> I32:
    """Return the (2 · blocks + 2,) first op of each window into which blocks in `order` cut `step`."""
    forward, backward = (ends[order] for ends in _ends(step))
    begins = np.flatnonzero((step.ops.phase == Phase.BACKWARD) | (step.ops.phase == Phase.RECOMPUTE))
    inside = begins[step.ops.block[begins] >= 0]
    last_forward = int(forward.max(initial=0))
    start = int(inside[0]) if len(inside) else last_forward + 1
    edges = np.concatenate([forward + 1, [start], backward[::-1] + 1])  # first op of the next window
    found: I32 = np.minimum(np.maximum.accumulate(np.concatenate([[0], edges])), step.ops.n - 1).astype(
        np.int32
    )
    return found


def held_bytes(step: Step, order: I32, hardware: Hardware) -> I64:
    """Return the (blocks,) bytes that only autograd holds from each block's forward to its backward."""
    # A tensor that several blocks saved counts for the last of them: the block that received it as
    # input holds it, whether or not the block that made it keeps or recomputes it.
    rounding = hardware.allocation_rounding_bytes
    forward, _ = _ends(step)
    last = int(forward.max(initial=0))
    producer = step.storages.producer[step.saves.storage]
    rows = (
        (step.saves.block >= 0)
        & (step.saves.held_until > last)
        & (producer >= 0)
        & (step.storages.tier[step.saves.storage] == Tier.DEVICE)
    )
    rows &= (step.ops.phase[producer] == Phase.FORWARD) & (
        step.storages.held_until[step.saves.storage] <= last
    )
    place = np.argsort(order).astype(np.int32)
    holder = np.full(step.storages.n, -1, np.int32)
    np.maximum.at(holder, step.saves.storage[rows], place[step.saves.block[rows]])
    storages = np.flatnonzero(holder >= 0)
    n_bytes = -(-step.storages.bytes[storages] // rounding) * rounding
    return np.bincount(holder[storages], n_bytes, len(order)).astype(np.int64)
