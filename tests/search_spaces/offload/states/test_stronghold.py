"""A window of layers: prefetch, width of the window, and bytes on the link.

Distinguishing test: a block's weights are loaded while others compute, the window's width is the smallest
that the inequality allows (brute force), blocks of the window between forward and backward are not loaded
again for backward, and deferred updates are in progress when the step returns.
"""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from typing import ClassVar

import numpy as np
import pytest
import torch
from fixed_cpu import CPU, NO_HOST_COSTS
from support.suites.block_offload_suite import LayersSuite, block_bytes, require_waits, total
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.autotune.predict.caching_allocator import AllocatorSettings, event_stream, replay
from memtune.autotune.predict.simulation import simulate
from memtune.errors import ApplyError
from memtune.offload.optimizer import native_update
from memtune.program.step import Kind, Resource, Tier
from memtune.search_spaces.offload.states.stronghold import Stronghold
from memtune.technique import Target
from memtune.testing import rewritten, train
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import SEED, build, config_of, one_step, settings_of

NATIVE = AllocatorSettings()
DEFAULT = Stronghold(kind="stronghold")
AT_THE_END = Stronghold(kind="stronghold", window=2, trigger="end_of_step")
THREE = Stronghold(kind="stronghold", window=3)


class TestStronghold(LayersSuite):
    technique = Stronghold
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "tied")}
    variants = (Stronghold(kind="stronghold", window=2, deferred=(0, 2)), AT_THE_END, DEFAULT)
    quick = ("gpt",)

    def test_window_bounds_bytes_and_residency(self) -> None:
        """The mechanism: blocks between forward and backward are not loaded again, and no more than the
        window is resident.
        """
        plain, step = rewritten(ZOO["gpt"]), rewritten(ZOO["gpt"], THREE)
        sizes = block_bytes(plain)
        there = step.with_storages(
            tier=np.where(step.storages.kind == Kind.COMMUNICATION, step.storages.tier, Tier.SSD).astype(
                np.uint8
            )
        )
        assert there.peak_bytes() == sum(sizes[:3])
        batch = total(plain, Resource.HOST_TO_DEVICE)
        outside = sum(int(plain.storages.bytes[p.storage]) for p in plain.parameters if p.block < 0)
        assert total(step, Resource.HOST_TO_DEVICE) - batch - outside == 2 * sum(sizes) - sum(sizes[-3:])

    @pytest.mark.parametrize("technique", [THREE, AT_THE_END], ids=str)
    def test_allocator_asks_the_driver_for_nothing_in_steady_state(self, technique: Stronghold) -> None:
        """The paper reserves buffers for the window; the caching allocator's free blocks serve as such."""
        found = replay(event_stream(rewritten(ZOO["gpt"], technique, micro_batch=64), 4), NATIVE, None)
        assert found.native.step_device_calls[0] > 0
        assert found.native.step_device_calls[1:].tolist() == [0, 0, 0]

    def test_blocks_are_prefetched(self) -> None:
        """The mechanism: on a stream of their own, two moments before their use."""
        plain, step = rewritten(ZOO["gpt"]), rewritten(ZOO["gpt"], THREE)
        copies = np.flatnonzero((step.ops.resource == Resource.HOST_TO_DEVICE) & (step.ops.prefetch == 1))
        assert len(copies) == sum(
            p.block >= 0 for p in plain.parameters
        )  # of 5 loads, one is of the block that computes
        used = step.uses.storage[np.isin(step.uses.op, copies) & (step.uses.mode == 1)]
        computes = step.ops.resource == Resource.COMPUTE
        for copy, storage in zip(copies.tolist(), used.tolist(), strict=True):
            uses = step.uses.op[(step.uses.storage == storage) & computes[step.uses.op]]
            assert (
                not len(uses) or step.ops.block[copy] != step.ops.block[uses[0]]
            )  # backward needs no biases

    def test_solved_window_is_within_the_budget(self) -> None:
        program, target = plain_program(ZOO["gpt"]), target_of()
        fast, slow = (
            replace(target, hardware=replace(target.hardware, host_to_device_bytes_per_s=rate))
            for rate in (1e15, 1.0)
        )
        assert DEFAULT.plan(program, fast).slots == 2
        assert DEFAULT.plan(program, slow).slots == 4
        peak = rewritten(ZOO["gpt"], THREE).peak_bytes()
        assert DEFAULT.plan(program, replace(slow, budget_bytes=peak)).slots == 3
        assert DEFAULT.plan(program, replace(slow, budget_bytes=1)).slots == 1

    def test_window_larger_than_the_model_is_refused(self) -> None:
        wide = Stronghold(kind="stronghold", window=9)
        assert "4 blocks only" in str(wide.fits(plain_program(ZOO["gpt"]), target_of()))
        _, model, optimizer = build(ZOO["gpt"])
        with pytest.raises(ApplyError, match=r"MT364 .*4 blocks only"):
            apply(model, optimizer, {"settings": settings_of(wide)}, strict=False)

    @pytest.mark.parametrize("reads", ["state dict", "evaluation"])
    def test_deferred_updates_run_after_the_step_returns_and_reads_wait_for_them(self, reads: str) -> None:
        """The mechanism: all blocks' updates wait for a busy thread; the step does not wait for them, a read
        of the state does.
        """
        late = Stronghold(kind="stronghold", window=2, deferred=(0, 1, 2, 3))
        workload, model, optimizer = build(ZOO["gpt"])
        tuned = apply(model, optimizer, config_of(ZOO["gpt"], late), strict=False)
        one_step(workload, model, optimizer, tuned, seed=SEED + 1)
        goes_on = Event()

        def read() -> None:
            if reads == "state dict":
                model.state_dict()
            else:
                with torch.no_grad():
                    workload.loss(model, workload.make_batch(2))

        tuned.state_dict()  # nothing is under way
        busy = native_update._threads().submit(goes_on.wait, 60)
        try:
            one_step(workload, model, optimizer, tuned, seed=SEED + 2)
            assert not busy.done()
            require_waits(read, goes_on)
        finally:
            goes_on.set()
        assert tuned.audit()
        found, other = (
            model.state_dict(),
            train(ZOO["gpt"], Stronghold(kind="stronghold", window=2, deferred=()), steps=2),
        )
        assert all(torch.equal(found[name], value) for name, value in other.weights.items())

    def test_slow_host_updates_overlap_with_the_next_forward(self) -> None:
        """In the simulator as well, if the planner defers updates that backward would wait for."""
        program = plain_program(ZOO["gpt"])
        slow = replace(
            CPU,
            host_adam_bytes_per_s=CPU.host_adam_bytes_per_s / 10,
            device="cuda",
            launch_s=0.0,
            hook_s=0.0,
            **NO_HOST_COSTS,
        )
        target = Target(slow)
        within = Stronghold(kind="stronghold", deferred=())
        plans = [each.plan(program, target) for each in (DEFAULT, within)]
        assert plans[0].deferred
        across, all_within = (
            simulate(each.rewrite(program, plan, target), slow, level="events")
            for each, plan in zip((DEFAULT, within), plans, strict=True)
        )
        assert across.step_s < 0.95 * all_within.step_s
        assert across.busy_s["host_threads"] == pytest.approx(all_within.busy_s["host_threads"])

    def test_deferred_blocks_out_of_range_are_refused(self) -> None:
        late = Stronghold(kind="stronghold", window=2, deferred=(4,))
        assert "no block 4" in str(late.fits(plain_program(ZOO["gpt"]), target_of()))
        _, model, optimizer = build(ZOO["gpt"])
        with pytest.raises(ApplyError, match=r"MT364 .*no block 4"):
            apply(model, optimizer, {"settings": settings_of(late)}, strict=False)
