"""What the blocks of a program may do, measured on the program itself by the passes that will do it.

Blocks that are equal share their options. A *level* is one option for every block; its step is rewritten
once, and what each block holds, needs and costs is read off its live bytes moment by moment, so that plans
are priced by what the passes predict.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache

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
    Combination,
    Made,
    combinations,
    keeping,
)
from memtune.technique import Target, Technique

LIMIT = 26
"""Options of a block."""
_OTHERS = 5
"""Techniques whose decision for a block is an option: attention_output, selective, balanced, core attention,
and full.
"""
MIN_MOVED_BYTES = 65536
"""Smaller tensors stay: a copy has a fixed cost."""


@dataclass(frozen=True)
class Option:
    """What a block does between its forward and its backward."""

    calls: OpAddresses | None
    """What its second run keeps and leaves out; None: it does not run again."""
    moved: frozenset[OpAddress] = frozenset()
    """Calls whose outputs go to the host."""
    again: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    """Names and counts of the ops that run a second time, for people."""


PLAIN = Option(None)
FULL = Option(OpAddresses())
"""All of the block runs again: never the fastest for what it holds, but what `full` does is there to be
chosen.
"""


@dataclass(frozen=True, eq=False)
class Moments:
    """Most live bytes of a step in the windows that its blocks cut it into."""

    forward: I64
    """(blocks,) up to the end of each block's forward."""
    after: int
    """From there to the backward of the last block."""
    backward: I64
    """(blocks,) up to the end of each block's backward, which come in reverse order."""
    rest: int

    @property
    def peak_bytes(self) -> int:
        """Of the whole step."""
        return max(int(self.forward.max(initial=0)), self.after, int(self.backward.max(initial=0)), self.rest)


@dataclass(frozen=True, eq=False)
class Levels:
    """Options of every block of one step and what they need and cost, (blocks, options) each."""

    step: Step
    order: I32
    """(blocks,) rows of `step.blocks` in the order in which they run; the rows of all that follows."""
    options: tuple[tuple[Option, ...], ...]
    """By class of equal blocks, the first of each keeps everything."""
    class_of: I32
    """(blocks,)"""
    plain: Moments
    held_bytes: I64
    forward_bytes: I64
    backward_bytes: I64
    after_bytes: int
    seconds: F64
    uniform: tuple[tuple[int, float], ...] = ()
    """Peak and seconds of each level, where blocks cannot be told apart in time and so all take the same
    level.
    """
    others: tuple[I32, ...] = ()
    """Plans that other techniques would make: each of their decisions for all blocks, and full recompute of
    one block in n.
    """

    def problem(self, now: Moments | None = None) -> Problem:
        """For the planner; `now` are the moments of the plain step as later passes leave it."""
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
        """The option of each of `step.blocks`, from a solution of `problem`."""
        if self.uniform:
            choice = np.repeat(choice, len(self.class_of))
        by_class = [self.options[each] for each in self.class_of.tolist()]
        found = [
            options[min(i, len(options) - 1)] for options, i in zip(by_class, choice.tolist(), strict=True)
        ]
        return [found[place] for place in np.argsort(self.order).tolist()]


def rewritten(step: Step, chosen: list[Option]) -> Step:
    """`step` with its blocks recomputed and their tensors moved as chosen."""
    again = [i for i, option in enumerate(chosen) if option.calls is not None]
    new = (
        recompute_blocks(step, again, [option.calls or OpAddresses() for option in chosen]) if again else step
    )
    return move_activations(new, move_claims(chosen))


def move_claims(chosen: list[Option], on_ssd: frozenset[int] = frozenset()) -> list[OffloadClaim]:
    """What the blocks give to the host; that of blocks `on_ssd` goes on from there."""
    return [
        OffloadClaim(i, 1.0, only=option.moved, stays_on_host=i not in on_ssd)
        for i, option in enumerate(chosen)
        if option.moved
    ]


@lru_cache(maxsize=8)
def levels(step: Step, hardware: Hardware, ranks: int, host: bool, mover: Technique | None = None) -> Levels:
    """The options of every block of `step`, measured; with `host` tensors may go to host memory.

    With a `mover`, a technique that moves as much of each block whatever the budget, they are measured on
    what it leaves of them.
    """
    split = split_calls(step)
    links = (
        hardware if host and split is step else None
    )  # calls of a block that runs several times have no addresses yet
    seconds = op_seconds(step, hardware, ranks)
    calls = zip(block_graphs(split), step.calls.block.tolist(), step.calls.grad_enabled.tolist(), strict=True)
    blocks = {
        block: graph for graph, block, seen in reversed(list(calls)) if seen
    }  # one under no_grad has nothing to decide
    order = np.argsort(_ends(step)[0], kind="stable").astype(np.int32)
    options: list[tuple[Option, ...]] = []
    others: list[tuple[int, ...]] = []
    known: dict[object, int] = {}
    class_of = []
    for block in order.tolist():
        graph = blocks.get(block)
        ops = () if graph is None else made_in(split, graph, seconds, links)
        key = tuple(
            (op.name, op.reads, op.bytes, op.saved, op.keepable, op.given, round(op.seconds, 12))
            for op in ops
        )
        if key not in known:
            known[key] = len(options)
            mine, theirs = _options(split, graph, ops)
            options.append(mine)
            others.append(theirs)
        class_of.append(known[key])
    found = _measured(step, order, tuple(options), np.asarray(class_of, np.int32), hardware, ranks, mover)
    if split is not step or not _in_order(step, order):
        return found
    return replace(found, uniform=(), others=_other_plans(order, np.asarray(others, np.int32)[class_of]))


def _other_plans(order: I32, others: I32) -> tuple[I32, ...]:
    """From which option each of the others is, (blocks, others), to plans of all blocks."""
    one_in = [np.where(order % n == 0, others[:, -1], 0).astype(np.int32) for n in (2, 3, 4)]
    return (*others.T, *one_in)


def _options(
    step: Step, block: Block | None, ops: tuple[Made, ...]
) -> tuple[tuple[Option, ...], tuple[int, ...]]:
    """The options of a block, and by other technique which of them is what that technique does to it."""
    if block is None:
        return (PLAIN,), (0,) * _OTHERS
    known = [
        frozenset(i for i, op in enumerate(ops) if keeps(op.name))
        for keeps in (is_attention, is_matmul_or_attention)
    ]
    others = [option_of(step, block, keeping(ops, each)) for each in known]
    for again in (inputs_of_products(block), core_attention(block)):
        frees = block.saved & {s for op in again for s in block.makes[op]}
        others.append(Option(calls_for(step, block, again), again=_counted(block, again)) if frees else PLAIN)
    others.append(FULL if block.saved else PLAIN)
    priced = [option_of(step, block, each) for each in combinations(ops, LIMIT - _OTHERS - 1, known)]
    found = tuple(dict.fromkeys([PLAIN, *priced, *others]))
    return found, tuple(found.index(each) for each in others)


def option_of(step: Step, block: Block, combination: Combination) -> Option:
    """What `combination` says of `block`. Op 0 of a combination is what the block is called with; the others
    are the block's.
    """
    again = {block.ops[i - 1] for i in combination.again}
    ops = np.asarray(block.ops, np.int32)
    address = (
        dict(zip(block.ops, (call for _, _, call in calls_of(step, ops)), strict=True))
        if combination.moved
        else {}
    )
    moved = frozenset(address[block.ops[i - 1]] if i else INPUTS for i in combination.moved)
    return Option(calls_for(step, block, again) if again else None, moved, _counted(block, again))


def _counted(block: Block, again: set[int]) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(block.name[op] for op in sorted(again)).items())


def made_in(step: Step, block: Block, op_s: F64, links: Hardware | None) -> tuple[Made, ...]:
    """What `block` is called with and its forward, as the planner sees it; without `links` nothing moves."""
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
    found = [Made("inputs", 0.0, (), n_bytes, needed, bool(entered), _away_s(n_bytes, links), given=True)]
    for op in block.ops:
        saved = [s for s in block.makes[op] if s in block.saved]
        dear = is_matmul_or_attention(block.name[op])
        reads = {place[block.producer[s]] for s in block.reads[op] if s in block.producer} - {place[op]}
        reads |= {0} if entered.intersection(block.reads[op]) else set()
        n_bytes = sum(map(bytes_of.__getitem__, saved or block.makes[op])) if saved or dear else 0
        keepable = bool(saved or dear) and op not in block.spoiled
        away_s = _away_s(n_bytes, links)
        found.append(
            Made(
                block.name[op], float(op_s[op]), tuple(sorted(reads)), n_bytes, bool(saved), keepable, away_s
            )
        )
    return tuple(found)


@lru_cache(maxsize=2)
def _bytes_of(step: Step) -> list[int]:
    found: list[int] = step.storages.bytes.tolist()
    return found


def _away_s(n_bytes: int, links: Hardware | None) -> dict[Action, float]:
    """The copy back is waited for; the one out runs beside the rest of the forward, and `_measured` sees
    where it does not.
    """
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
    mover: Technique | None,
) -> Levels:
    n_levels = max(map(len, options), default=1)
    shape = len(order), n_levels
    held, forward, backward = (np.zeros(shape, np.int64) for _ in range(3))
    seconds, after, uniform = np.zeros(shape), [], []
    plain, first = moments(_moved(step, mover, hardware), order, hardware), forward_and_backward(step)
    rest = int(live_bytes(step, hardware)[first.ops.n :].max(initial=0))
    found = Levels(step, order, options, class_of, plain, held, forward, backward, 0, seconds, ((0, 0.0),))
    for level in range(n_levels):
        new = _moved(rewritten(first, found.chosen(np.asarray([level], np.int32))), mover, hardware)
        seconds[:, level] = _seconds(new, op_seconds(new, hardware, ranks))[order] - seconds[:, 0] * (
            level > 0
        )
        now = moments(new, order, hardware)
        uniform.append((max(now.peak_bytes, rest), float(seconds[:, level].sum()) * (level > 0)))
        held[:, level] = held_bytes(new, order, hardware)
        before = np.cumsum(held[:, level]) - held[:, level]
        forward[:, level], backward[:, level] = now.forward - before, now.backward - before
        after.append(now.after - int(held[:, level].sum()))
    seconds[:, 0] = 0.0  # what the model's own checkpoints run again, it does in any case
    return replace(found, after_bytes=int(np.median(after)), uniform=tuple(uniform))


def _moved(step: Step, mover: Technique | None, hardware: Hardware) -> Step:
    """`step` as `mover` leaves it."""
    if mover is None:
        return step
    program, target = Program((RankClass(1, step),), 1), Target(hardware, chosen={mover.slot: mover})
    return mover.rewrite(program, mover.plan(program, target), target).step


def op_seconds(step: Step, hardware: Hardware, ranks: int) -> F64:
    """(n,) seconds of each op; one that is shorter than it takes to issue it costs the host as much."""
    costs = op_costs(step, hardware, ranks=ranks)
    found: F64 = np.maximum(costs.op_s, costs.issue_s)
    return found


def _seconds(step: Step, op_s: F64) -> F64:
    """(blocks,) what each block runs again and waits for: copies back, and copies out as far as they outlast
    its forward.
    """
    inside = step.ops.block >= 0

    def total(ops: npt.NDArray[np.bool_]) -> F64:
        mine = inside & ops
        found: F64 = np.bincount(step.ops.block[mine], op_s[mine], len(step.blocks)).astype(np.float64)
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
    """(n,) device bytes as the allocator counts them."""
    rounding = hardware.allocation_rounding_bytes
    mine = np.flatnonzero(step.storages.tier == Tier.DEVICE)
    n_bytes = -(-step.storages.bytes[mine] // rounding) * rounding
    delta = np.zeros(step.ops.n + 1, np.int64)
    np.add.at(delta, np.maximum(step.storages.producer[mine], 0), n_bytes)
    np.add.at(delta, np.minimum(step.freed_after[mine], step.ops.n - 1) + 1, -n_bytes)
    return np.cumsum(delta[:-1])


@lru_cache(maxsize=2)
def _ends(step: Step) -> tuple[I32, I32]:
    """(blocks,) last forward op of each block, and last op of its backward, -1 where there is none."""
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
    """Most live bytes in each window of `step`, whose blocks run in `order`."""
    most, n_blocks = np.maximum.reduceat(live_bytes(step, hardware), windows(step, order)), len(order)
    return Moments(most[:n_blocks], int(most[n_blocks]), most[n_blocks + 1 : -1][::-1], int(most[-1]))


def windows(step: Step, order: I32) -> I32:
    """(2 · blocks + 2,) first op of each window that the blocks cut `step` into; they run in `order`."""
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
    """(blocks,) bytes that autograd alone holds from each block's forward to its backward.

    What several blocks saved counts for the last of them: whether the one before, which made it, keeps or
    recomputes its own output, the one that was called with it holds it all the same.
    """
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
