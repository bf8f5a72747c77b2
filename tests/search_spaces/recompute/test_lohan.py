"""Activations are swapped as far as it pays, the rest recomputed: the number of bytes minimizes a convex
function.

Distinguishing test: the number of bytes is that of the least time over all numbers (brute force), it grows
with the link's speed, and it shrinks when a drive makes backward wait; spilled tensors are written once and
read once; a block's tensors are being reloaded before the block after it has run backward.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from fixed_cpu import CPU
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.program.residency import WRITES_IN_FLIGHT
from memtune.program.step import Phase, Program, Resource, Step, Tier
from memtune.runtime import transfer
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.offload.states.lohan import Lohan as States
from memtune.search_spaces.recompute._block_planner.swap import (
    Busy,
    Part,
    SwapChoice,
    argmin_convex,
    spilled_blocks,
    step_s,
)
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.lohan import Lohan
from memtune.ssd import offload_dir, ssd_tensors
from memtune.technique import Target
from memtune.testing import TechniqueSuite, differences, drift, recorded, rewritten, train
from memtune.testing.drift_check import plain_program, planned, target_of
from memtune.testing.training import build, config_of, plain

SMALL = Lohan(kind="lohan", min_bytes=1)
SPILLS = Lohan(kind="lohan", min_bytes=1, host_bytes=400_000, spill="ssd")
pytestmark = pytest.mark.usefixtures("fixed_cpu")  # how much is swapped is a matter of rates


def target_with_links(bytes_per_s: float, *chosen: States) -> Target:
    """Return a target with links of that speed, a slow drive, and the technique chosen for
    `offload.states`.
    """
    machine = replace(CPU, host_to_device_bytes_per_s=bytes_per_s, device_to_host_bytes_per_s=bytes_per_s)
    machine = replace(machine, ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    return Target(machine, chosen={each.slot: each for each in chosen})


def swapped(program: Program, target: Target) -> int:
    return swapped_by(SMALL, program, target)


def swapped_by(technique: Lohan, program: Program, target: Target | None = None) -> int:
    return int(technique.plan(program, target or target_of()).swapped_bytes)


def total(step: Step, resource: Resource) -> int:
    return int(step.ops.traffic_bytes[step.ops.resource == resource].sum())


def early_reloads(technique: Lohan) -> int:
    """Return the reloads of the first block's tensors that start before the last block's backward is over."""
    step = rewritten(ZOO["gpt"], technique)
    back = np.flatnonzero((step.ops.resource == Resource.HOST_TO_DEVICE) & (step.ops.phase == Phase.BACKWARD))
    last = np.flatnonzero((step.ops.phase == Phase.BACKWARD) & (step.ops.block == len(step.blocks) - 1))
    first = np.flatnonzero(
        (step.ops.phase > Phase.FORWARD) & (step.ops.block == 0) & (step.ops.resource == Resource.COMPUTE)
    )
    assert last[-1] < first[0]
    of_last = int(
        np.count_nonzero(
            (step.ops.resource == Resource.DEVICE_TO_HOST) & (step.ops.block == len(step.blocks) - 1)
        )
    )
    return max(0, int(np.count_nonzero(back < last[-1])) - of_last)


def random_busy(rng: np.random.Generator, micro_batches: int) -> Busy:
    forward, backward, boundary = ({each: float(rng.random()) for each in Resource} for _ in range(3))
    return Busy(forward, backward, boundary, micro_batches)


class TestLohan(TechniqueSuite):
    technique = Lohan
    models: ClassVar = {"gpt": ZOO["gpt"]}
    variants = (SMALL, SMALL.model_copy(update={"host_bytes": 400_000}), SPILLS)
    quick = ("gpt",)

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))

    @classmethod
    def default(cls) -> Lohan:
        return SMALL

    @pytest.mark.slow
    @pytest.mark.parametrize("model", ZOO)
    def test_training_is_as_predicted(self, model: str) -> None:
        if (reason := SMALL.fits(plain_program(ZOO[model]), target_of())) is not None:
            pytest.skip(str(reason))
        if model == "lstm":  # one tensor of a gate is held for an op longer than predicted, below the peak
            assert recorded(ZOO[model], SMALL).peak_bytes() == rewritten(ZOO[model], SMALL).peak_bytes()
        else:
            assert not drift(ZOO[model], SMALL)
        assert not differences(train(ZOO[model], SMALL), plain(ZOO[model]))

    def test_swapped_bytes_follow_link_and_drive_speed(self) -> None:
        """The mechanism: more with a faster link, and less if updates from a drive keep backward waiting
        anyway.
        """
        program = plain_program(ZOO["gpt"])
        by_link = [swapped(program, target_with_links(each)) for each in (1e8, 1e9, 5e9)]
        assert by_link[0] < by_link[1] < by_link[2]
        busy = [
            swapped(program, target_with_links(each, States(kind="lohan", bucket_mib=0.005)))
            for each in (1e8, 1e9, 5e9)
        ]
        assert busy == [by_link[0]] * 3

    def test_planned_bytes_cross_link_once_each_way(self) -> None:
        before, step = rewritten(ZOO["gpt"]), rewritten(ZOO["gpt"], SMALL)
        planned = swapped(plain_program(ZOO["gpt"]), target_of(SMALL))
        down, up = total(step, Resource.DEVICE_TO_HOST), total(step, Resource.HOST_TO_DEVICE)
        assert down == up - total(before, Resource.HOST_TO_DEVICE) == planned > 0
        capped = rewritten(ZOO["gpt"], SMALL.model_copy(update={"host_bytes": planned // 2}))
        assert 0 < total(capped, Resource.DEVICE_TO_HOST) <= planned // 2
        assert step.peak_bytes() < before.peak_bytes()
        assert total(rewritten(ZOO["gpt"], Full(kind="full")), Resource.DEVICE_TO_HOST) == 0

    @pytest.mark.parametrize("host_bytes", [0, 100_000, 400_000])
    def test_bytes_beyond_host_memory_are_written_to_ssd_and_read_once(self, host_bytes: int) -> None:
        """The mechanism: more is swapped than without, the host is filled, and the rest passes through it."""
        spills = SPILLS.model_copy(update={"host_bytes": host_bytes})
        program = plain_program(ZOO["gpt"])
        decisions = spills.plan(program, target_of(spills)).document()
        step, kept = rewritten(ZOO["gpt"], spills), decisions["swapped_bytes"] - decisions["spilled_bytes"]
        assert total(step, Resource.DEVICE_TO_HOST) == decisions["swapped_bytes"]
        for resource in (Resource.SSD_WRITE, Resource.SSD_READ):
            assert total(step, resource) == decisions["spilled_bytes"] == step.peak_bytes(Tier.SSD)
        assert 0 <= kept <= host_bytes
        largest = int(step.ops.traffic_bytes[step.ops.resource == Resource.SSD_WRITE].max())
        # Batch, and random states of the blocks that run again, as under full recompute.
        rest = rewritten(ZOO["gpt"], Full(kind="full")).peak_bytes(Tier.HOST)
        assert (
            step.peak_bytes(Tier.HOST) - rest
            <= kept + (max(WRITES_IN_FLIGHT, spills.read_prefetch) + 1) * largest
        )
        capped = SMALL.model_copy(update={"host_bytes": host_bytes})
        if capped.fits(program, target_of()) is None:
            assert decisions["swapped_bytes"] >= swapped_by(capped, program)

    def test_spilled_bytes_are_those_counted_in_training_and_none_are_left(self) -> None:
        workload, model, optimizer = build(ZOO["gpt"])
        decisions = planned(ZOO["gpt"], SPILLS)[1]["recompute"].document()
        tuned = apply(model, optimizer, config_of(ZOO["gpt"], SPILLS), loss=workload.loss, strict=False)
        with tier(HOST):
            batch = workload.make_batch(2)
        tuned.step([batch])
        COUNTERS.take()
        tuned.step([batch])
        counted = COUNTERS.take()
        assert (counted["ssd_write"], counted["ssd_read"]) == (
            decisions["spilled_bytes"],
            decisions["spilled_bytes"],
        )
        assert counted["device_to_host"] == decisions["swapped_bytes"]
        gc.collect()
        assert ssd_tensors.current().used_bytes == 0

    def test_slow_drive_takes_less(self) -> None:
        program, target = plain_program(ZOO["gpt"]), target_with_links(5e9)
        none = SPILLS.model_copy(update={"host_bytes": 0})
        slow = replace(
            target, hardware=replace(target.hardware, ssd_read_bytes_per_s=1e8, ssd_write_bytes_per_s=1e8)
        )
        assert swapped_by(none, program, slow) < swapped_by(none, program, target)

    @pytest.mark.parametrize("seed", range(4))
    def test_minimum_with_a_drive_is_that_of_brute_force(self, seed: int) -> None:
        """Over all numbers of parts; and as few of the first blocks are spilled as make room."""
        rng = np.random.default_rng(seed)
        busy = random_busy(rng, 2)
        parts = [Part(i, int(rng.integers(1, 5e7)), float(rng.random() / 4)) for i in range(8)]
        found = SwapChoice.fastest(parts, busy, target_with_links(1e8).hardware, 1000, 60_000_000, spill=True)
        costs = [found.costs_s(count) for count in range(9)]
        assert argmin_convex(found.costs_s, 8) == int(np.argmin(costs)) >= found.count
        blocks = dict(enumerate(rng.integers(0, 10, 6).tolist()))
        gone = spilled_blocks(blocks, 12)
        assert sum(size for block, size in blocks.items() if block not in gone) <= 12
        assert not gone or sum(size for block, size in blocks.items() if block not in gone[:-1]) > 12

    @pytest.mark.parametrize("seed", range(6))
    def test_minimum_is_that_of_brute_force(self, seed: int) -> None:
        """Over all numbers of parts; and, where parts are of one size, over all sets of them. T is convex in
        the bytes.
        """
        rng = np.random.default_rng(seed)
        busy, same = random_busy(rng, int(rng.integers(1, 4))), bool(seed % 2)
        parts = [
            Part(i, 10_000_000 if same else int(rng.integers(1, 5e7)), float(rng.random() / 4))
            for i in range(8)
        ]
        machine = replace(CPU, host_to_device_bytes_per_s=1e8, device_to_host_bytes_per_s=1e8)
        found = SwapChoice.fastest(parts, busy, machine, 1000, None)
        costs = [found.costs_s(count) for count in range(9)]
        count = argmin_convex(found.costs_s, 8)
        assert count == int(np.argmin(costs)) >= found.count
        at = np.cumsum([0, *(each.n_bytes for each in found.parts)])
        slopes = np.diff(costs) / np.diff(at)
        assert (np.diff(slopes) >= -1e-15).all()
        every = [set(chosen) for size in range(9) for chosen in combinations(parts, size)]
        best = min(
            step_s(
                busy,
                machine,
                1000 + sum(p.n_bytes for p in chosen),
                sum(p.saved_s for p in parts if p not in chosen),
            )
            for chosen in every
        )
        assert costs[count] >= best
        if same:
            assert costs[count] == pytest.approx(best, rel=1e-12)

    @pytest.mark.parametrize("seed", range(6))
    def test_exposed_copies_are_priced(self, seed: int) -> None:
        """The number of parts with the least seconds, given that the largest block's copies are alone on the
        link.
        """
        rng = np.random.default_rng(seed)
        busy = random_busy(rng, 2)
        parts = [Part(i % 3, int(rng.integers(1, 5e7)), float(rng.random() / 4)) for i in range(8)]
        machine = target_with_links(float(rng.choice([1e8, 1e9]))).hardware
        found = SwapChoice.fastest(parts, busy, machine, 1000, None)
        costs = [found.costs_s(count) for count in range(9)]
        for count in range(9):
            most = max(sum(p.n_bytes for p in found.parts[:count] if p.block == block) for block in range(3))
            costs[count] += 2 * most / machine.host_to_device_bytes_per_s
        assert found.count == int(np.argmin(costs))

    def test_block_is_prefetched_while_another_runs_backward(self) -> None:
        """The mechanism: all reloads of the first block start before the last one's backward is over."""
        assert early_reloads(SMALL) > 0
        assert early_reloads(SMALL.model_copy(update={"window": 0})) == 0

    def test_copies_that_are_waited_for_swap_no_more(self) -> None:
        program = plain_program(ZOO["gpt"])
        for link in (1e9, 5e9, 2e10):
            waits = SMALL.model_copy(update={"window": 0})
            assert swapped_by(waits, program, target_with_links(link)) <= swapped_by(
                SMALL, program, target_with_links(link)
            )

    def test_training_prefetches_tensors_on_a_thread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The live model prefetches as many tensors as the pass predicts; with a window of 0 none."""
        for window in (None, 0):
            technique = SMALL.model_copy(update={"window": window})
            workload, model, optimizer = build(ZOO["gpt"])
            tuned = apply(
                model, optimizer, config_of(ZOO["gpt"], technique), loss=workload.loss, strict=False
            )
            monkeypatch.setattr(transfer, "_INLINE_BYTES", 0)  # the model's tensors are small
            uploads = Mock(wraps=transfer._upload_threads().submit)
            monkeypatch.setattr(transfer._upload_threads(), "submit", uploads)
            with tier(HOST):
                batch = workload.make_batch(2)
            tuned.step([batch])
            step = rewritten(ZOO["gpt"], technique)
            ahead = (step.ops.resource == Resource.HOST_TO_DEVICE) & (step.ops.prefetch == 1)
            assert uploads.call_count == int(np.count_nonzero(ahead))
            assert (uploads.call_count > 0) == (window is None)
            monkeypatch.undo()
            assert not transfer._prefetched

    def test_unsupported_programs_are_refused(self) -> None:
        program = plain_program(ZOO["gpt"])
        assert "another technique moves" in str(SMALL.fits(program, target_of(CopyOut(kind="copy_out"))))
        assert "dispatch mode" in str(SMALL.fits(program, replace(target_of(), compiled="blocks")))
        nothing = SMALL.model_copy(update={"min_bytes": 1 << 30})
        assert "faster to swap" in str(nothing.fits(program, target_of()))
        assert "amount of host memory" in str(
            SPILLS.model_copy(update={"host_bytes": None}).fits(program, target_of())
        )
        assert "no directory" in str(SPILLS.fits(program, replace(target_of(), offload_dir="")))
