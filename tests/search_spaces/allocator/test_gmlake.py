"""Training from stitched memory: the plain model's bits, a steady state without driver calls, one allocator
per process.

Distinguishing test: after every second of many blocks is freed, one request as large as their sum needs no
new memory.
"""

from __future__ import annotations

import os

import pytest
import torch
from support.suites.arena_suite import ArenaSuite
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.errors import ApplyError
from memtune.memory import arena, cpu_allocator
from memtune.search_spaces.allocator.gmlake import GMLake
from memtune.search_spaces.allocator.planned_layout import PlannedLayout
from memtune.testing.training import build, one_step, settings_of

pytestmark = pytest.mark.native_ledger


class TestGMLake(ArenaSuite):
    technique = GMLake

    def test_trained_memory_is_its_own_and_no_call_is_made_once_steady(self) -> None:
        workload, model, optimizer = build(ZOO["gpt"])
        tuned = apply(model, optimizer, {"settings": settings_of(GMLake(arena_below_mb=2))}, strict=False)
        calls = []
        for step in range(12):
            one_step(workload, model, optimizer, tuned, seed=step, size=8)
            calls.append(arena.statistics().driver_calls)
        assert arena.statistics().requests > 1000
        assert calls[-1] == calls[5] > 0

    def test_second_allocator_of_a_process_is_refused(self) -> None:
        _, model, optimizer = build(ZOO["tied"])
        tuned = apply(model, optimizer, {"settings": settings_of(GMLake())}, strict=False)
        held = torch.ones(1000)
        _, other, other_optimizer = build(ZOO["tied"])
        with pytest.raises(ApplyError, match=r"MT352 .*trains with an allocator already(.|\n)*gmlake"):
            apply(other, other_optimizer, {"settings": settings_of(PlannedLayout())}, strict=False)
        assert tuned.audit()["allocator"]["in_use_bytes"] >= held.nbytes
        assert torch.equal(held, torch.ones(1000))

    def test_memory_that_runs_out_is_torchs_own_error(self) -> None:
        arena.install(GMLake().settings())
        base = cpu_allocator.live_bytes()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1 << 45, dtype=torch.uint8)
        assert cpu_allocator.live_bytes() == base
        assert torch.ones(10).sum() == 10

    def test_forked_child_writes_nothing_into_its_parents_memory(self) -> None:
        arena.install(GMLake().settings())
        before = torch.full((1 << 20,), 3.0)
        child = os.fork()
        if child == 0:  # what it makes and frees is its own; no more than this may run here
            made = [torch.full((1 << 20,), 5.0) for _ in range(4)]
            os._exit(0 if all(bool((each == 5).all()) for each in made) else 1)
        after = [torch.full((1 << 20,), 7.0) for _ in range(4)]
        assert os.waitpid(child, 0)[1] == 0
        assert bool((before == 3).all())
        assert all(bool((each == 7).all()) for each in after)
