"""A cache of chunks: its size is searched, one number for the whole step, and chunks are prefetched.

Distinguishing test: chunk size, number of chunks and resident chunks have the least time, or without resident
chunks the fewest bytes copied, over all sizes and numbers (brute force); the number is one for all moments,
chunks are prefetched, and resident chunks never cross the link.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from support.suites.block_offload_suite import OWN, LayersSuite, total
from support.suites.resident_chunks_suite import check_resident, split_block_bytes
from support.zoo_paths import ZOO

from memtune.offload.chunks.chunk_planner import chunk_sizes
from memtune.offload.chunks.resident_chunks_planner import resident_counts
from memtune.offload.core.parameter_layout import pack
from memtune.offload.parameters.parameter_offload_pass import sizes_in_blocks
from memtune.program.residency import cache_residency
from memtune.program.step import Kind, Resource, Tier
from memtune.search_spaces.offload.states._common.chunk_technique import non_chunk_bytes
from memtune.search_spaces.offload.states._common.resident_chunks import on_device, seconds_of
from memtune.search_spaces.offload.states.elixir import Elixir
from memtune.technique import Target
from memtune.testing import rewritten
from memtune.testing.drift_check import plain_program, target_of

DEFAULT = Elixir(kind="elixir")
SMALL = Elixir(kind="elixir", chunk_bytes=70_000, prefetch=0)
CACHE_ALONE = DEFAULT.model_copy(update={"device_updates": False})
BUDGET_BYTES, ROOMY_BYTES = 2_100_000, 2_400_000


class TestElixir(LayersSuite):
    technique = Elixir
    models: ClassVar = {"tied": ZOO["tied"]}
    variants = (DEFAULT, SMALL)
    quick = ("tied",)
    update = OWN

    def test_searched_size_and_number_copy_the_fewest_bytes(self) -> None:
        """The mechanism: the search, against every number and every size that any packing of the real model
        has.
        """
        program, target = (
            plain_program(ZOO["gpt"]),
            replace(target_of(CACHE_ALONE), budget_bytes=BUDGET_BYTES),
        )
        capacity, sizes = BUDGET_BYTES - max(non_chunk_bytes(program)), sizes_in_blocks(program.step)
        moved = []
        for chunks in (pack(*sizes, size) for size in chunk_sizes(*sizes, above=True)):
            uses = chunks.uses(1)
            for slots in range(max(map(len, uses)), min(capacity // chunks.chunk_bytes, chunks.count) + 1):
                moves = cache_residency(uses, (slots,) * len(uses), "lru").moves
                moved.append((moves * chunks.chunk_bytes, slots * chunks.chunk_bytes))
        plan = CACHE_ALONE.plan(program, target)
        step, plain = CACHE_ALONE.rewrite(program, plan, target).step, program.step
        outside = sum(int(plain.storages.bytes[p.storage]) for p in plain.parameters if p.block < 0)
        up = total(step, Resource.HOST_TO_DEVICE) - total(plain, Resource.HOST_TO_DEVICE) - outside
        assert (up, plan.chunk_bytes * plan.slots[0]) == min(moved)
        assert up < max(moved)[0]
        assert len(set(plan.slots)) == 1
        assert step.peak_bytes() <= BUDGET_BYTES < plain.peak_bytes()

    def test_cache_holds_no_more_than_its_chunks(self) -> None:
        program, target = plain_program(ZOO["gpt"]), replace(target_of(SMALL), budget_bytes=BUDGET_BYTES)
        plan = SMALL.model_copy(update={"device_updates": False}).plan(program, target)
        step = SMALL.rewrite(program, plan, target).step
        chunks = step.with_storages(
            tier=np.where(step.storages.kind == Kind.COMMUNICATION, step.storages.tier, Tier.SSD).astype(
                np.uint8
            )
        )
        assert chunks.peak_bytes() == 70_000 * plan.slots[0]

    def test_chunks_are_prefetched(self) -> None:
        """The mechanism: on a stream of their own, before the block that uses them computes; with `prefetch:
        0` none is.
        """
        step, late = rewritten(ZOO["gpt"], DEFAULT), rewritten(ZOO["gpt"], SMALL)
        down = step.ops.resource == Resource.HOST_TO_DEVICE
        ahead = np.flatnonzero(down & (step.ops.prefetch == 1))
        assert len(ahead)
        assert not (late.ops.prefetch[late.ops.resource == Resource.HOST_TO_DEVICE] == 1).any()
        computes = step.ops.resource == Resource.COMPUTE
        for copy in ahead.tolist():
            (storage,) = step.uses.storage[(step.uses.op == copy) & (step.uses.mode == 1)]
            uses = step.uses.op[(step.uses.storage == storage) & computes[step.uses.op]]
            assert step.ops.block[copy] not in step.ops.block[uses[:1]]

    def test_cache_and_residents_have_the_least_time_of_links_and_updates(self) -> None:
        """The mechanism (chunks resident with their state): the least time over all sizes, resident chunks,
        and slots.
        """
        program, on = plain_program(ZOO["gpt"]), target(host_adam_bytes_per_s=1e9)
        plan, sizes = DEFAULT.plan(program, on), sizes_in_blocks(program.step)
        there, seconds = on_device(program.step), seconds_of(program.step, on.hardware)
        taken, room = there.bytes_at(8), ROOMY_BYTES - np.asarray(non_chunk_bytes(program))
        prices: dict[tuple[int, int, int], float] = {}
        for chunks in (pack(*sizes, size) for size in chunk_sizes(*sizes, above=True)):
            for staying in resident_counts(chunks).tolist():
                rest = pack(sizes[0][staying:], sizes[1][staying:], chunks.chunk_bytes)
                uses = rest.uses(1)
                most = min(int((room - taken[staying]).min()) // chunks.chunk_bytes, rest.count)
                for slots in range(max(map(len, uses)), most + 1):
                    moved = cache_residency(uses, (slots,) * 8, "lru").moves * chunks.chunk_bytes
                    update_s = sum(seconds.host[staying:]) + sum(seconds.device[:staying])
                    prices[chunks.chunk_bytes, staying, slots] = moved / seconds.up_bytes_per_s + update_s
        found = plan.chunk_bytes, plan.resident_parameters, plan.slots[0]
        assert prices[found] == pytest.approx(min(prices.values()))
        assert plan.resident_parameters > 0
        step = DEFAULT.rewrite(program, plan, on).step
        assert step.peak_bytes() <= ROOMY_BYTES < program.step.peak_bytes()
        stay, rest_bytes, outside = split_block_bytes(program.step, plan.resident_parameters)
        state = (step.storages.kind == Kind.OPTIMIZER) & (step.storages.tier == Tier.DEVICE)
        assert int(step.storages.bytes[state].sum()) == 2 * sum(stay) + 4 * len(stay)
        assert total(step, Resource.DEVICE_TO_HOST) == sum(rest_bytes) + outside
        check_resident(ZOO["gpt"], DEFAULT, plan, step)

    def test_fast_host_and_link_get_a_larger_cache(self) -> None:
        program = plain_program(ZOO["gpt"])
        fast, slow = (
            target(host_adam_bytes_per_s=1e15, device_to_host_bytes_per_s=1e15),
            target(host_adam_bytes_per_s=1e9),
        )
        cache, keeps = (DEFAULT.plan(program, each).document() for each in (fast, slow))
        assert cache.get("resident_parameters", 0) < keeps["resident_parameters"]
        assert "resident_parameters" not in CACHE_ALONE.plan(program, slow).document()


def target(**rates: float) -> Target:
    """Return a target with a budget below the plain gpt's peak, and hardware of these rates."""
    plain = target_of(DEFAULT)
    return replace(plain, budget_bytes=ROOMY_BYTES, hardware=replace(plain.hardware, **rates))
