"""A cache of chunks: its size is searched for, one number for the whole step, and chunks come in ahead of their use."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from layers_suite import OWN, LayersSuite, total
from zoo_paths import ZOO

from memtune.chunks import pack
from memtune.passes.stream import sizes_in_blocks
from memtune.planners.chunks import chunk_sizes
from memtune.program import Kind, Resource, Tier
from memtune.residency import cached
from memtune.search_spaces.offload.states._chunks import beside
from memtune.search_spaces.offload.states.elixir import Elixir
from memtune.testing import rewritten
from memtune.testing.drift import plain_program, target_of

DEFAULT = Elixir(kind="elixir")
SMALL = Elixir(kind="elixir", chunk_bytes=70_000, ahead=0)
BUDGET_BYTES = 2_100_000


class TestElixir(LayersSuite):
    technique = Elixir
    models: ClassVar = {"tied": ZOO["tied"]}
    variants = (DEFAULT, SMALL)
    quick = ("tied",)
    update = OWN

    def test_size_and_number_are_those_that_move_the_fewest_bytes(self) -> None:
        """The mechanism: the search, against every size that any packing of the real model has, and every number."""
        program, target = plain_program(ZOO["gpt"]), replace(target_of(DEFAULT), budget_bytes=BUDGET_BYTES)
        capacity, sizes = BUDGET_BYTES - max(beside(program)), sizes_in_blocks(program.step)
        moved = []
        for chunks in (pack(*sizes, size) for size in chunk_sizes(*sizes)):
            uses = chunks.uses(1)
            for slots in range(max(map(len, uses)), min(capacity // chunks.chunk_bytes, chunks.count) + 1):
                moves = cached(uses, (slots,) * len(uses), "lru").moves
                moved.append((moves * chunks.chunk_bytes, slots * chunks.chunk_bytes))
        plan = DEFAULT.plan(program, target)
        step, plain = DEFAULT.rewrite(program, plan, target).step, program.step
        outside = sum(int(plain.bytes[p.storage]) for p in plain.parameters if p.block < 0)
        up = total(step, Resource.HOST_TO_DEVICE) - total(plain, Resource.HOST_TO_DEVICE) - outside
        assert (up, plan.decisions["chunk_bytes"] * plan.decisions["slots"][0]) == min(moved)
        assert up < max(moved)[0]
        assert len(set(plan.decisions["slots"])) == 1
        assert step.peak_bytes() <= BUDGET_BYTES < plain.peak_bytes()

    def test_the_cache_holds_no_more_than_its_chunks(self) -> None:
        program, target = plain_program(ZOO["gpt"]), replace(target_of(SMALL), budget_bytes=BUDGET_BYTES)
        plan = SMALL.plan(program, target)
        step = SMALL.rewrite(program, plan, target).step
        chunks = replace(step, tier=np.where(step.kind == Kind.COMMUNICATION, step.tier, Tier.SSD).astype(np.uint8))
        assert chunks.peak_bytes() == 70_000 * plan.decisions["slots"][0]

    def test_chunks_come_in_ahead_of_their_use(self) -> None:
        """The mechanism: on a stream of their own, before the block that uses them computes; with `ahead: 0` none does."""
        step, late = rewritten(ZOO["gpt"], DEFAULT), rewritten(ZOO["gpt"], SMALL)
        down = step.op_resource == Resource.HOST_TO_DEVICE
        ahead = np.flatnonzero(down & (step.op_prefetch == 1))
        assert len(ahead)
        assert not (late.op_prefetch[late.op_resource == Resource.HOST_TO_DEVICE] == 1).any()
        computes = step.op_resource == Resource.COMPUTE
        for copy in ahead.tolist():
            (storage,) = step.use_storage[(step.use_op == copy) & (step.use_mutates == 1)]
            uses = step.use_op[(step.use_storage == storage) & computes[step.use_op]]
            assert step.op_block[copy] not in step.op_block[uses[:1]]
