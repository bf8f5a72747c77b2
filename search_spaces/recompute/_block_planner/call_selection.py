"""Translate the ops that shall be recomputed into the calls that a block keeps or skips in its second run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from pydantic import model_validator

from memtune import refusals
from memtune.activations.recompute import spoiled
from memtune.program import SHAPE_ALONE, Kind, OpAddresses, Phase, Step, calls_of, split_calls
from memtune.search_spaces._plan_fields import CallsField, Index, require_entries
from memtune.search_spaces.recompute._block_planner.fits import MATMULS, is_matmul_or_attention
from memtune.technique import Plan


class CallsPlan(Plan):
    """Calls of each block that do not run again."""

    calls: tuple[CallsField, ...]
    """The different sets of calls."""
    blocks: tuple[Index, ...]
    """(blocks,) entry of `calls` of each block."""

    @model_validator(mode="after")
    def _has_entries(self) -> Self:
        require_entries("calls", self.calls, self.blocks)
        return self


@dataclass(frozen=True)
class Block:
    """The forward of one block as a graph of ops and storages."""

    index: int
    ops: list[int]
    """Rows in the step, ascending."""
    name: dict[int, str]
    reads: dict[int, list[int]]
    """Op → storages that it reads or writes in place; storages whose shape alone it needs are not included.
    """
    makes: dict[int, list[int]]
    producer: dict[int, int]
    """Storage → op that makes it; storages made outside the block are not included."""
    readers: dict[int, list[int]]
    """Storage → ops of the whole forward that read it."""
    writers: dict[int, list[int]]
    """Storage → ops of the block that write into it after its producer."""
    saved: frozenset[int]
    """Storages made in the block that its forward saved for backward."""
    spoiled: frozenset[int]
    """Ops whose outputs are written into later and so cannot be kept."""


_BATCHED = ("aten.bmm.default", "aten.baddbmm.default")
_PRODUCTS = MATMULS - {*_BATCHED}  # batched products multiply two activations: unfused attention

Again = Callable[[Block], set[int]]
"""Function that selects the ops of a block that a technique runs again."""


def plan_calls(step: Step, again: Again) -> CallsPlan:
    """Return the plan of a technique that runs the ops `again` a second time and keeps all else that autograd
    saved.

    Equal blocks share an entry of `calls`.

    Args:
        step: The recorded step.
        again: Called with each block; returns rows of `step.ops` from `Block.ops`. `_split` adds the ops that
            these need.
    """
    split = split_calls(step)  # the same calls run again in each call of a block
    address = {op: call for op, _, call in calls_of(split, _forward_rows(split))}
    entries: list[OpAddresses] = []
    which: dict[int, int] = {}
    for block, index, seen in zip(
        block_graphs(split), step.calls.block.tolist(), step.calls.grad_enabled.tolist(), strict=True
    ):
        # A block's plan follows from its first call that autograd records; one address serves all.
        if index in which or not seen:
            continue
        kept, skipped = _split(block, again(block))
        calls = OpAddresses(*(frozenset(address[op] for op in ops) for ops in (kept, skipped)))
        # A plan is written to the config, so equal blocks are listed once.
        if calls not in entries:
            entries.append(calls)
        which[index] = entries.index(calls)
    return CallsPlan(
        calls=tuple(entries), blocks=tuple(which.get(index, 0) for index in range(len(step.blocks)))
    )


def calls_for(step: Step, block: Block, again: set[int]) -> OpAddresses:
    """Return the calls that `block` keeps and skips when it runs `again`; equal for equal blocks."""
    address = {op: call for op, _, call in calls_of(step, np.asarray(block.ops, np.int32))}
    kept, skipped = _split(block, again)
    return OpAddresses(*(frozenset(address[op] for op in ops) for ops in (kept, skipped)))


def calls_by_block(plan: CallsPlan, blocks: int) -> list[OpAddresses]:
    """Return the calls of each of `blocks` blocks.

    Raises:
        ApplyError: The plan is for another number of blocks.
    """
    refusals.require_blocks(len(plan.blocks), blocks, "recompute", "recompute: {kind: selective}")
    return [plan.calls[i] for i in plan.blocks]


def frees_saved_tensors(step: Step, again: Again) -> bool:
    """Return True if some block would recompute a tensor that autograd saved."""
    return any(
        block.saved & {s for op in again(block) for s in block.makes[op]} for block in block_graphs(step)
    )


def core_attention(block: Block) -> set[int]:
    """Return the ops of unfused attention from the product of queries and keys up to, not including, the
    product with values.

    That is a softmax, the ops that lead to it from a batched product, and those from it to another one.
    """
    core: set[int] = set()
    for softmax in (op for op in block.ops if "softmax" in block.name[op]):
        up, down = _reached(block, {softmax}, _sources), _reached(block, {softmax}, _readers)
        scores, values = ({op for op in ops if block.name[op] in _BATCHED} for ops in (up, down))
        if scores and values:
            core |= (
                {softmax}
                | scores
                | (up & _reached(block, scores, _readers))
                | (down & _reached(block, values, _sources))
            )
    return core


def inputs_of_products(block: Block) -> set[int]:
    """Return ops whose outputs only weights' matrix products, or such ops, read: norms, activations."""
    found: set[int] = set()
    # Readers come first, so each op's readers are already decided.
    for op in reversed(block.ops):
        # Expensive to run again, or needed by its own backward.
        if is_matmul_or_attention(block.name[op]) or "softmax" in block.name[op]:
            continue
        readers = {reader for s in block.makes[op] for reader in block.readers.get(s, ()) if reader != op}
        if readers and all(reader in found or block.name.get(reader) in _PRODUCTS for reader in readers):
            found.add(op)
    return found


def _reached(block: Block, starts: set[int], onward: Callable[[Block, int], set[int]]) -> set[int]:
    """Return ops reached from `starts` up to batched products; other products and attention end it."""
    found: set[int] = set()
    waiting = {each for start in starts for each in onward(block, start)}
    while waiting:
        op = waiting.pop()
        batched = block.name[op] in _BATCHED
        if op in found or (is_matmul_or_attention(block.name[op]) and not batched):
            continue
        found.add(op)
        waiting |= set() if batched else onward(block, op)
    return found


def _readers(block: Block, op: int) -> set[int]:
    return {
        reader
        for s in block.makes[op]
        for reader in block.readers.get(s, ())
        if reader in block.name and reader != op
    }


def _sources(block: Block, op: int) -> set[int]:
    return {block.producer[s] for s in block.reads[op] if s in block.producer and block.producer[s] != op}


def _split(block: Block, again: set[int]) -> tuple[set[int], set[int]]:
    """Return the ops to keep and the ops to skip in the second run, if the ops `again` run in it."""
    # An op is kept if autograd saved its output and it is not in `again`; then its output is held from
    # forward on. An op that saved nothing is skipped, unless an op of the second run reads its output:
    # then it runs too, or is kept if it is a product or attention, so that no product runs twice. So
    # `again` is a lower bound: a policy names what it gives up, and what that needs follows.
    kept = {block.producer[s] for s in block.saved} - again - block.spoiled
    run: set[int] = set()
    waiting = again | {op for op in block.spoiled if block.saved.intersection(block.makes[op])}
    while waiting:
        op = waiting.pop()
        run.add(op)
        kept.discard(op)
        wanted = {block.producer[s] for s in block.reads[op] if s in block.producer}
        # In-place writers of a value that is made again must change it again.
        wanted |= {writer for s in block.makes[op] for writer in block.writers.get(s, ())}
        for other in wanted - run - kept:
            if (
                is_matmul_or_attention(block.name[other])
                and other not in block.spoiled
                and other not in again
            ):
                kept.add(other)
            else:
                waiting.add(other)
        if not waiting:
            # Only when nothing else waits: an op that the second run cannot skip may need further ones.
            waiting = {each for each in _between(block, run, kept) if not _can_be_skipped(block, each)}
    # Kept for backward alone: autograd's saved tensor serves it, and the second run reads no output.
    only_saved = {
        op for op in kept if not block.saved.issuperset(block.makes[op]) and not run & _readers(block, op)
    }
    return kept - only_saved, _between(block, run, kept) | only_saved


def _between(block: Block, run: set[int], kept: set[int]) -> set[int]:
    """Return ops before the last one that runs again which are neither kept nor needed."""
    last = max(run, default=-1)
    return {op for op in block.ops if op < last} - run - kept


def _can_be_skipped(block: Block, op: int) -> bool:
    writes_outside = not block.makes[op] and any(s not in block.producer for s in block.reads[op])
    return op not in block.spoiled and not writes_outside


@lru_cache(maxsize=16)  # a space is built technique by technique, over the micro-batches of each
def block_graphs(step: Step) -> tuple[Block, ...]:
    """Return the blocks of `step` that ran, as graphs."""
    rows = _forward_rows(step)
    reads: dict[int, list[int]] = {op: [] for op in rows.tolist()}
    alone = [number for number, name in enumerate(step.names) if name in SHAPE_ALONE]
    shapes = set(rows[np.isin(step.ops.name[rows], alone)].tolist()) if alone else set()
    readers: dict[int, list[int]] = {}
    writers: dict[int, list[int]] = {}
    forward = step.ops.phase[step.uses.op] == Phase.FORWARD
    columns = (step.uses.op[forward], step.uses.storage[forward], step.uses.mode[forward])
    for op, storage, mutates in zip(*(column.tolist() for column in columns), strict=True):
        # It needs shapes only, so a freed input need not be recomputed for it.
        if op in shapes:
            continue
        if op in reads:
            reads[op].append(storage)
        readers.setdefault(storage, []).append(op)
        # A recomputed value lacks a later op's write, unless that op runs again too.
        if mutates and step.storages.producer[storage] != op:
            writers.setdefault(storage, []).append(op)
    makes: dict[int, list[int]] = {op: [] for op in reads}
    for storage in np.flatnonzero(
        (step.storages.producer >= 0) & (step.storages.kind != Kind.WORKSPACE)
    ).tolist():
        if int(step.storages.producer[storage]) in makes:
            makes[int(step.storages.producer[storage])].append(storage)
    bad = spoiled(step)
    found = []
    for index in range(len(step.blocks)):
        ops = rows[step.ops.block[rows] == index].tolist()
        name = {op: step.names[step.ops.name[op]] for op in ops}
        producer = {storage: op for op in ops for storage in makes[op]}
        saved = frozenset(step.saves.storage[step.saves.block == index].tolist()) & producer.keys()
        again = frozenset(op for op in ops if bad[op])
        mine = {storage: [op for op in writers.get(storage, ()) if op in name] for storage in producer}
        found.append(
            Block(
                index=index,
                ops=ops,
                name=name,
                reads=_of(reads, ops),
                makes=_of(makes, ops),
                producer=producer,
                readers=readers,
                writers=mine,
                saved=saved,
                spoiled=again,
            )
        )
    return tuple(found)


def _of(table: dict[int, list[int]], ops: Iterable[int]) -> dict[int, list[int]]:
    return {op: table[op] for op in ops}


def _forward_rows(step: Step) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.flatnonzero((step.ops.phase == Phase.FORWARD) & (step.ops.block >= 0)).astype(np.int32)
