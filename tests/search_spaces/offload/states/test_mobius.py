"""Stages on one device: loads, bytes on the link, and the solved partition.

Distinguishing test: weights of every stage but the first are loaded while another computes, the partition is
the fastest of all (brute force), no mapping has less contention, and deferred updates are in progress when
the step returns.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from threading import Event
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fixed_cpu import CPU, NO_HOST_COSTS
from support.suites.block_offload_suite import block_bytes, require_waits, total
from support.suites.layer_major_suite import CHAIN, PacksSuite, config, drifts, planned

from memtune.api import Tuned, apply
from memtune.autotune.predict.simulation import simulate
from memtune.errors import ApplyError, ConfigError
from memtune.offload.optimizer import native_update
from memtune.offload.optimizer.deferred_updates import DeferredUpdates
from memtune.program.step import Phase, Resource, Step
from memtune.search_spaces.offload.states.harmony import Harmony
from memtune.search_spaces.offload.states.mobius import Mobius
from memtune.testing import rewritten
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import build, settings_of

THREE = Mobius(kind="mobius", stages=3)
DEFAULT = Mobius(kind="mobius")
DEFERRED = Mobius(kind="mobius", stages=3, deferred=(0, 2, 5))


def loads(step: Step) -> np.ndarray[Any, Any]:
    """Return the ops that load weights of blocks."""
    copies = step.ops.name == step.names.index("memtune.copy_to_device_.default")
    return np.flatnonzero(copies & (step.ops.phase != Phase.OPTIMIZER))


class TestMobius(PacksSuite):
    technique = Mobius
    variants = (DEFERRED,)

    def test_bytes_are_twice_the_weights_and_once_the_gradients(self) -> None:
        """The mechanism: 2|W| - |W of the last stage| + |gradients|, for any number of micro-batches."""
        sizes = block_bytes(rewritten(CHAIN))
        for micro_batches in (1, 4):
            plan = planned(THREE, micro_batches)
            step, stages = plan.program.step, plan.plans["offload.states"].backward
            stay = sum(sizes[slice(*stages[-1])])
            assert int(step.ops.traffic_bytes[loads(step)].sum()) == 2 * sum(sizes) - stay
            assert plan.plans["offload.states"].moved_bytes == 3 * sum(sizes) - stay
        boundaries = 2 * 16 * 32 * 4 * 4 * len(stages)
        outside = sum(4 * int(np.prod(p.shape)) for p in rewritten(CHAIN).parameters if p.block < 0)
        assert total(step, Resource.DEVICE_TO_HOST) == sum(sizes) + outside + boundaries

    def test_next_stage_is_prefetched_while_one_computes(self) -> None:
        """The mechanism: no load but the first stage's is waited for at once; packs without prefetch wait."""
        step, plan = planned(THREE, 2).program.step, planned(THREE, 2).plans["offload.states"].document()
        first = plan["backward"][0]
        ahead = step.ops.prefetch[loads(step)] == 1
        block = step.ops.block[loads(step)]
        forward = step.ops.phase[loads(step)] == Phase.FORWARD
        assert (ahead == ~(forward & (block >= first[0]) & (block < first[1]))).all()
        waits = planned(Harmony(kind="harmony", backward=2), 2).program.step
        assert not (waits.ops.prefetch[loads(waits)] == 1).any()

    def test_two_stages_are_resident_at_once(self) -> None:
        """The mechanism: memory for the stage that computes and the prefetched one, no more."""
        step = planned(THREE, 2).program.step
        sizes = block_bytes(rewritten(CHAIN))
        stages = [sum(sizes[slice(*each)]) for each in planned(THREE, 2).plans["offload.states"].backward]
        there = step.with_storages(
            tier=np.where(step.storages.kind == 7, step.storages.tier, 2).astype(np.uint8)
        )
        assert there.peak_bytes() == max(one + other for one, other in itertools.pairwise(stages))

    def test_stages_follow_from_budget_and_link(self) -> None:
        """Without a budget one stage copies the fewest bytes on a slow link; a smaller budget needs more
        stages, and is kept.
        """
        program, target = plain_program(CHAIN), target_of(DEFAULT)
        slow = replace(target, hardware=replace(target.hardware, host_to_device_bytes_per_s=1.0))
        assert DEFAULT.plan(program, slow).stages == 1
        whole = DEFAULT.rewrite(program, DEFAULT.plan(program, slow), slow).step.peak_bytes()
        less = replace(slow, budget_bytes=whole * 2 // 3)
        plan = DEFAULT.plan(program, less)
        assert plan.stages > 1
        assert DEFAULT.rewrite(program, plan, less).step.peak_bytes() <= whole * 2 // 3
        assert DEFAULT.plan(program, replace(slow, budget_bytes=1)).stages == 6

    @pytest.mark.slow
    def test_pass_equals_the_recorded_step_with_several_micro_batches(self) -> None:
        assert not drifts(DEFERRED, 3)

    @pytest.mark.parametrize("reads", ["state dict", "evaluation", "the next step"])
    def test_deferred_updates_run_after_the_step_returns_and_reads_wait_for_them(self, reads: str) -> None:
        """The mechanism: deferred updates wait for a busy thread; the step does not wait for them, a read of
        the state does.
        """
        workload, model, optimizer = build(CHAIN)
        tuned = apply(model, optimizer, config(DEFERRED, 2), loss=workload.loss, strict=False)
        batches = [[workload.make_batch(2) for _ in range(2)] for _ in range(3)]
        tuned.step(batches[0])
        tuned.state_dict()  # nothing is under way
        goes_on, begun = Event(), Event()

        def start_after_the_gate(
            updates: DeferredUpdates, run: Any, real: Any = DeferredUpdates.start
        ) -> None:
            if updates._waiting:
                native_update._threads().submit(goes_on.wait, 60)
                begun.set()
            real(updates, run)

        def read() -> None:
            if reads == "state dict":
                model.state_dict()
            elif reads == "evaluation":
                with torch.no_grad():
                    workload.loss(model, batches[0][0])
            else:
                tuned.step(batches[2])

        try:
            with patch.object(DeferredUpdates, "start", start_after_the_gate):
                tuned.step(batches[1])
            assert begun.is_set()
            require_waits(read, goes_on)
        finally:
            goes_on.set()
        steps = 3 if reads == "the next step" else 2
        found = model.state_dict()
        _, plain, its_optimizer = build(CHAIN)
        other = apply(
            plain,
            its_optimizer,
            config(Mobius(kind="mobius", stages=3, deferred=()), 2),
            loss=workload.loss,
            strict=False,
        )
        for each in batches[:steps]:
            other.step(each)
        assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())

    def test_slow_host_updates_overlap_with_the_next_forward(self) -> None:
        """In the simulator as well, if the planner defers updates that backward would wait for."""
        # The host's updates take one and a half times as long as all that is computed on the device.
        slow = replace(
            CPU,
            host_adam_bytes_per_s=CPU.host_adam_bytes_per_s / 10,
            device="cuda",
            launch_s=0.0,
            hook_s=0.0,
            **NO_HOST_COSTS,
        )
        program, target = plain_program(CHAIN), replace(target_of(DEFAULT), hardware=slow)
        plans = [Mobius(kind="mobius", stages=6, deferred=late).plan(program, target) for late in (None, ())]
        assert plans[0].deferred
        across, within = (
            simulate(DEFAULT.rewrite(program, plan, target), slow, level="events") for plan in plans
        )
        assert across.step_s < 0.95 * within.step_s
        assert across.busy_s["host_threads"] == pytest.approx(within.busy_s["host_threads"])

    def test_fits_refuses_by_name(self) -> None:
        late = Mobius(kind="mobius", stages=3, deferred=(6,))
        assert "no block 6 to defer" in str(late.fits(plain_program(CHAIN), target_of(DEFAULT)))
        document = copy.deepcopy(config(DEFERRED, 2).document())
        document["plan"]["offload.states"]["deferred"] = [6]
        with pytest.raises(
            ConfigError,
            match=r"MT316 .*plan\.offload\.states: .*deferred updates of blocks \[6\], but there are 6",
        ):
            apply(*build(CHAIN)[1:], document, strict=False)
        assert "6 blocks only" in str(
            Mobius(kind="mobius", stages=9).fits(plain_program(CHAIN), target_of(DEFAULT))
        )
        _, model, optimizer = build(CHAIN)
        with pytest.raises(ApplyError, match=r"MT316 .* needs a plan"):
            apply(model, optimizer, {"settings": settings_of(DEFAULT)}, strict=False)

    def sabotage(self, tuned: Tuned) -> bool:
        block = tuned._context.model.get_submodule(tuned._context.blocks[0])
        vars(block).pop("forward")
        return True
