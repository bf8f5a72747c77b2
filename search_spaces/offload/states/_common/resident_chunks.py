"""Which chunks stay on the device and are updated there: planners asked with a step's bytes, answers held
against the pass.
"""

from __future__ import annotations

import functools

import numpy as np

from memtune.hardware import Hardware
from memtune.offload.chunks import (
    ChunkPlan,
    OnDevice,
    Seconds,
    all_resident,
    cheapest_split,
    most_in_margin,
    resident_counts,
)
from memtune.offload.optimizer import cannot_part
from memtune.offload.parameters import in_blocks, sizes_in_blocks, state_bytes
from memtune.program import Program, Step, Units, columns_of
from memtune.search_spaces.offload.states._common.chunk_technique import are_rows, beside, in_chunks


def with_margin(program: Program, found: ChunkPlan, budget_bytes: int) -> ChunkPlan:
    """`found` with as many chunks updated on the device as have room beside all others, which then come in
    once a step.

    No more of them stay within the budget, each looked at as the pass writes it.
    """
    sizes, there = sizes_in_blocks(program.step), on_device(program.step)
    room, taken = _room(program, budget_bytes, found.in_place), there.taken(len(found.slots))

    def spare_bytes(kept: int) -> int:
        return -_over_bytes(program, all_resident(*sizes, found, kept), budget_bytes)

    kept = most_in_margin(found.chunks, room, taken)
    if kept < 0 or cannot_part(program.step):
        return found
    while (spare := spare_bytes(kept) if kept else max(budget_bytes, 0)) < 0:
        kept = max(min(most_in_margin(found.chunks, [each + spare for each in room], taken), kept - 1), 0)
    always = np.append(0, np.cumsum(there.always_bytes))[resident_counts(found.chunks)]
    while (
        kept + 1 < found.chunks.count and always[kept + 1] - always[kept] - found.chunks.chunk_bytes <= spare
    ):
        spare = spare_bytes(
            kept + 1
        )  # no less than that is added: a chunk of weights goes, they and their state are there
        if spare < 0:
            break
        kept += 1
    return all_resident(*sizes, found, kept) if kept else found


def split(
    program: Program, hardware: Hardware, budget_bytes: int, chunk_bytes: int | None, ahead: int
) -> ChunkPlan | None:
    """What `cheapest_split` finds within the budget; None where nothing fits, or nothing can stay."""
    step, most = program.step, None
    there, seconds, room = on_device(step), seconds_of(step, hardware), _room(program, budget_bytes)
    while True:
        found = cheapest_split(
            *sizes_in_blocks(step),
            room,
            ahead,
            there,
            seconds,
            most=most,
            gathered=are_rows(program),
            chunk_bytes=chunk_bytes,
        )
        if found is None or not found.staying:
            return found
        if cannot_part(program.step):
            return None
        over = _over_bytes(program, found, budget_bytes, ahead)
        if over <= 0:
            return found
        taken = there.taken(1)[:, 0]  # the optimizer's temporaries take more with each
        most = min(
            int(np.searchsorted(taken, taken[found.staying] - over, side="right")) - 1, found.staying - 1
        )


def _over_bytes(program: Program, how: ChunkPlan, budget_bytes: int, ahead: int | None = None) -> int:
    """By how much `program` exceeds the budget; `ahead` is Elixir's."""
    rewritten = in_chunks(program, how, "belady") if ahead is None else in_chunks(program, how, "lru", ahead)
    return rewritten.step.peak_bytes() - budget_bytes


def _room(program: Program, budget_bytes: int, in_place: bool = False) -> Units:
    return tuple(budget_bytes - other for other in beside(program, in_place))


@functools.lru_cache(maxsize=64)
def on_device(step: Step) -> OnDevice:
    """What the parameters of blocks take where they are updated on the device."""
    columns, mine = columns_of(step.parameters), in_blocks(step)
    weight = (columns.numel * columns.itemsize)[mine]
    has = columns.gradient[mine] >= 0
    summed = has & (step.storages.producer[columns.gradient[mine]] < 0)
    always = weight + state_bytes(step)[mine] + np.where(summed, weight, 0)
    landed = np.where(has & ~summed, weight, 0)
    return OnDevice(tuple(always.tolist()), tuple(landed.tolist()), tuple(columns.block[mine].tolist()))


@functools.lru_cache(maxsize=64)
def seconds_of(step: Step, hardware: Hardware) -> Seconds:
    """What a step pays for each parameter of a block: an update reads and writes weight and state, and reads
    the gradient.
    """
    columns, mine = columns_of(step.parameters), in_blocks(step)
    weight = (columns.numel * columns.itemsize)[mine]
    down = np.where(columns.gradient[mine] >= 0, weight, 0)
    update = np.where(columns.gradient[mine] >= 0, 3 * weight + 2 * state_bytes(step)[mine], 0)
    host_s = down / hardware.device_to_host_bytes_per_s + update / hardware.host_adam_bytes_per_s
    device_s = update / hardware.memory_bytes_per_s
    return Seconds(hardware.host_to_device_bytes_per_s, tuple(host_s.tolist()), tuple(device_s.tolist()))
