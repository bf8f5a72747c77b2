"""Chunks that are resident and updated on the device: planners, checked against the pass."""

from __future__ import annotations

import functools

import numpy as np

from memtune.hardware import Hardware
from memtune.offload.chunks import (
    ChunkPlan,
    OnDevice,
    Seconds,
    cheapest_split,
    most_in_margin,
    resident_counts,
    with_resident_first,
)
from memtune.offload.optimizer import cannot_part
from memtune.offload.parameters import in_blocks, sizes_in_blocks, state_bytes
from memtune.program import Program, Step, Units, columns_of
from memtune.search_spaces.offload.states._common.chunk_technique import (
    are_sharded,
    in_chunks,
    non_chunk_bytes,
)


def with_resident_chunks(program: Program, found: ChunkPlan, budget_bytes: int) -> ChunkPlan:
    """Return `found` with as many chunks resident and updated on the device as fit next to all others."""
    # The others are then loaded once a step. No larger number stays within the budget: each is
    # rewritten by the pass.
    sizes, device_bytes = sizes_in_blocks(program.step), on_device(program.step)
    room, taken = _room(program, budget_bytes, found.in_place), device_bytes.bytes_at(len(found.slots))

    def spare_bytes(resident: int) -> int:
        return -_over_bytes(program, with_resident_first(*sizes, found, resident), budget_bytes)

    resident = most_in_margin(found.chunks, room, taken)
    if resident < 0 or cannot_part(program.step):
        return found
    while (spare := spare_bytes(resident) if resident else max(budget_bytes, 0)) < 0:
        resident = max(
            min(most_in_margin(found.chunks, [each + spare for each in room], taken), resident - 1), 0
        )
    always = np.append(0, np.cumsum(device_bytes.always_bytes))[resident_counts(found.chunks)]
    while (
        resident + 1 < found.chunks.count
        and always[resident + 1] - always[resident] - found.chunks.chunk_bytes <= spare
    ):
        # The condition's bytes are a lower bound: one chunk fewer, its weights and state resident.
        spare = spare_bytes(resident + 1)
        if spare < 0:
            break
        resident += 1
    return with_resident_first(*sizes, found, resident) if resident else found


def split_cache(
    program: Program, hardware: Hardware, budget_bytes: int, chunk_bytes: int | None, prefetch: int
) -> ChunkPlan | None:
    """Return the split between cache and residents by `cheapest_split`; None if none is possible."""
    step, most = program.step, None
    device_bytes, seconds, room = on_device(step), seconds_of(step, hardware), _room(program, budget_bytes)
    while True:
        found = cheapest_split(
            *sizes_in_blocks(step),
            room,
            prefetch,
            device_bytes,
            seconds,
            most=most,
            gathered=are_sharded(program),
            chunk_bytes=chunk_bytes,
        )
        if found is None or not found.resident_parameters:
            return found
        if cannot_part(program.step):
            return None
        over = _over_bytes(program, found, budget_bytes, prefetch)
        if over <= 0:
            return found
        # With the optimizer's temporaries, which grow with each parameter.
        taken = device_bytes.bytes_at(1)[:, 0]
        most = min(
            int(np.searchsorted(taken, taken[found.resident_parameters] - over, side="right")) - 1,
            found.resident_parameters - 1,
        )


def _over_bytes(
    program: Program, chunk_plan: ChunkPlan, budget_bytes: int, prefetch: int | None = None
) -> int:
    """Return by how many bytes `program` exceeds the budget; `prefetch` is Elixir's."""
    rewritten = (
        in_chunks(program, chunk_plan, "belady")
        if prefetch is None
        else in_chunks(program, chunk_plan, "lru", prefetch)
    )
    return rewritten.step.peak_bytes() - budget_bytes


def _room(program: Program, budget_bytes: int, in_place: bool = False) -> Units:
    return tuple(budget_bytes - other for other in non_chunk_bytes(program, in_place))


@functools.lru_cache(maxsize=64)
def on_device(step: Step) -> OnDevice:
    """Return the bytes of blocks' parameters if they are updated on the device."""
    columns, of_blocks = columns_of(step.parameters), in_blocks(step)
    weight = columns.n_bytes[of_blocks]
    has = columns.gradient[of_blocks] >= 0
    summed = has & (step.storages.producer[columns.gradient[of_blocks]] < 0)
    always = weight + state_bytes(step)[of_blocks] + np.where(summed, weight, 0)
    ready = np.where(has & ~summed, weight, 0)
    return OnDevice(tuple(always.tolist()), tuple(ready.tolist()), tuple(columns.block[of_blocks].tolist()))


@functools.lru_cache(maxsize=64)
def seconds_of(step: Step, hardware: Hardware) -> Seconds:
    """Return a step's costs for each parameter of a block.

    An update reads and writes weight and state, and reads the gradient.
    """
    columns, of_blocks = columns_of(step.parameters), in_blocks(step)
    weight = columns.n_bytes[of_blocks]
    down = np.where(columns.gradient[of_blocks] >= 0, weight, 0)
    update = np.where(columns.gradient[of_blocks] >= 0, 3 * weight + 2 * state_bytes(step)[of_blocks], 0)
    host_s = down / hardware.device_to_host_bytes_per_s + update / hardware.host_adam_bytes_per_s
    device_s = update / hardware.memory_bytes_per_s
    return Seconds(hardware.host_to_device_bytes_per_s, tuple(host_s.tolist()), tuple(device_s.tolist()))
