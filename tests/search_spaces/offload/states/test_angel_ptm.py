"""Pages of weights: layout, schedule of loads, bytes on the link and resident bytes.

Distinguishing test: no page holds three parameters, less than a page per parameter is wasted, and frames hold
some pages of a parameter and not the others; no other placement of copies takes less time (brute force) and
just in time takes more; cached parameters never cross the link; and lock-free weights are those of Adam on
the gradients in the order of delivery.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fixed_cpu import CPU, NO_HOST_COSTS
from support.suites.block_offload_suite import (
    NATIVE,
    OWN,
    LayersSuite,
    block_bytes,
    refusal,
    to_the_device,
    total,
    without_gradients,
)
from support.zoo_paths import ZOO

from memtune.api import Tuned
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record.recording_session import Trace, start_session
from memtune.autotune.search.dry_runs import traced_under
from memtune.config.tuned_config import load_config
from memtune.errors import ApplyError, UsageError
from memtune.offload.core.parameter_layout import Pages, aligned, loads_of, paged, timeline
from memtune.offload.parameters.parameter_offload_pass import moment_of_ops, sizes_in_blocks
from memtune.program.step import Kind, Program, Resource, Step, Tier
from memtune.search_spaces.offload.states.angel_ptm import AngelPtm
from memtune.technique import Target
from memtune.testing import rewritten
from memtune.testing.drift_check import compare, plain_program, recording_of, target_of
from memtune.testing.training import differences, settings_of, train, train_under
from memtune.workload.workload import Workload

SMALL = AngelPtm(kind="angel_ptm", page_mib=0.01)
JUST_IN_TIME = SMALL.model_copy(update={"moves": "just_in_time"})
PAGE, BUDGET_BYTES = 10_240, 2_000_000


def target(technique: AngelPtm = SMALL, up_bytes_per_s: float = 1e10) -> Target:
    """Return a target with a budget below the plain gpt's peak."""
    plain = target_of(technique)
    return replace(
        plain,
        budget_bytes=BUDGET_BYTES,
        hardware=replace(plain.hardware, host_to_device_bytes_per_s=up_bytes_per_s),
    )


def under_budget(technique: AngelPtm, on: Target) -> tuple[Program, Pages, tuple[int, ...]]:
    """Return the gpt, its pages, and the number of loads during each moment."""
    program = plain_program(ZOO["gpt"])
    plan = technique.plan(program, on)
    decisions = plan.document()
    pages = paged(*sizes_in_blocks(program.step), decisions["page_bytes"], decisions["frames"])
    return technique.rewrite(program, plan, on), pages, tuple(decisions["prefetch"])


def copies(step: Step) -> np.ndarray[Any, Any]:
    """Return the ops that load pages."""
    ops = np.unique(
        step.storages.producer[(step.storages.kind == Kind.COMMUNICATION) & (step.storages.bytes == 0)]
    )
    assert (step.ops.resource[ops] == Resource.HOST_TO_DEVICE).all()
    return ops


class TestAngelPtm(LayersSuite):
    technique = AngelPtm
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "tied")}
    variants = (SMALL, AngelPtm(kind="angel_ptm"))
    quick = ("tied",)
    update = OWN

    def sabotage(self, tuned: Tuned) -> bool:
        state = next(iter(tuned.optimizer.state.values()))
        state["exp_avg"] = to_the_device(state["exp_avg"])
        return True

    def test_blocks_are_resident_in_part(self) -> None:
        """The mechanism (pages): between forward and backward frames hold some pages of a parameter; the
        others are loaded alone.
        """
        program, pages, _ = under_budget(SMALL, target())
        assert pages.page_bytes == PAGE
        room = BUDGET_BYTES - max(self._loads_by_moment(program.step, pages))
        assert pages.frames == room // PAGE < pages.count
        assert program.step.peak_bytes() <= BUDGET_BYTES < plain_program(ZOO["gpt"]).step.peak_bytes()
        loads = loads_of(pages)
        again = set(loads.page[loads.needed >= len(pages.of_block)].tolist())
        in_part = [
            parameter
            for parameter in range(len(pages.first))
            if 0 < sum(span.page in again for span in pages.spans(parameter)) < len(pages.spans(parameter))
        ]
        assert in_part
        assert pages.count < sum(-(-size // PAGE) for size in pages.n_bytes)  # parameters share pages
        assert (
            len(loads.page) < 2 * pages.count
        )  # whole blocks, as the window of `stronghold`, would move more

    def _loads_by_moment(self, step: Step, pages: Pages) -> np.ndarray[Any, Any]:
        frames = (step.storages.kind == Kind.COMMUNICATION) & (step.storages.bytes == pages.frame_bytes)
        assert frames.sum() == 1
        live: np.ndarray[Any, Any] = step.with_storages(
            tier=np.where(frames, np.uint8(Tier.SSD), step.storages.tier)
        ).live_bytes()
        return live[moment_of_ops(step) >= 0]

    def test_bytes_of_every_link_are_those_of_loaded_pages(self) -> None:
        program, pages, ahead = under_budget(SMALL, target())
        plain = rewritten(ZOO["gpt"])
        moved = sum(pages.filled[page] for comes in timeline(pages, ahead).loads for page in comes)
        assert moved < 2 * sum(pages.filled)
        outside = sum(int(plain.storages.bytes[p.storage]) for p in plain.parameters if p.block < 0)
        weights = sum(int(plain.storages.bytes[p.storage]) for p in plain.parameters)
        batch = total(plain, Resource.HOST_TO_DEVICE)
        assert total(program.step, Resource.HOST_TO_DEVICE) - batch == moved + outside
        assert total(program.step, Resource.DEVICE_TO_HOST) == weights

    def test_scheduled_loads_are_hidden_by_computation(self) -> None:
        """The mechanism (the unified schedule): loads hidden by computation are not waited for; just in time,
        all are.
        """
        found: dict[str, float] = {}
        for technique in (SMALL, JUST_IN_TIME):
            program, pages, ahead = under_budget(technique, target(technique))
            apart = replace(
                CPU, device="cuda", launch_s=0.0, hook_s=0.0, **NO_HOST_COSTS
            )  # a CPU's copies need the cores that compute
            found[technique.moves] = simulate(program, apart, level="events").step_s
            step, moment = program.step, moment_of_ops(program.step)
            ops, loads = copies(step), loads_of(pages)
            n_bytes = step.ops.traffic_bytes[ops]
            assert len(ops) < len(loads.page)  # pages side by side are one copy
            prefetched = step.ops.prefetch[ops] == 1
            if technique is JUST_IN_TIME:
                assert not prefetched.any()
                assert set(ahead) == {0}
            else:  # only what has no free frame before is waited for, and what the first block needs
                waited = loads.page[(loads.opens >= loads.needed) | (loads.needed == 0)].tolist()
                assert n_bytes[~prefetched].sum() == sum(pages.filled[page] for page in waited)
                per_moment = np.bincount(
                    np.maximum(moment[ops[prefetched]], 0), n_bytes[prefetched], len(ahead)
                )
                assert (per_moment <= np.asarray(ahead) * PAGE).all()
                assert (per_moment > 0).sum() > 3
        assert found["scheduled"] < found["just_in_time"]

    def test_slow_link_exposes_loads_that_compute_cannot_hide(self) -> None:
        _, pages, ahead = under_budget(SMALL, target(up_bytes_per_s=1e3))
        assert sum(ahead) <= len(ahead)
        late = sum(
            sum(page in used for page in comes)
            for used, comes in zip(pages.uses(), timeline(pages, ahead).loads, strict=False)
        )
        assert late >= len(loads_of(pages).page) - len(ahead)

    def test_training_under_a_budget_is_bitwise(self) -> None:
        plan = SMALL.plan(plain_program(ZOO["gpt"]), target()).document()
        document = {"settings": settings_of(SMALL), "plan": {"offload.states": plan}}
        got, wanted = train_under(ZOO["gpt"], document, steps=5), train(ZOO["gpt"], steps=5)
        assert all(np.array_equal(one, other) for one, other in zip(got.losses, wanted.losses, strict=True))
        assert all(np.array_equal(got.weights[name], value) for name, value in wanted.weights.items())

    def test_spare_memory_caches_state_for_updates_on_the_device(self) -> None:
        """The mechanism (the cache): neither weight nor gradient of the first parameters crosses the link,
        for the same bits.
        """
        program, on = plain_program(ZOO["gpt"]), replace(target(), budget_bytes=3_000_000)
        plan = SMALL.plan(program, on)
        cached = [p for p in program.step.parameters if p.block >= 0][: plan.cached]
        assert cached
        assert "cached" not in SMALL.model_copy(update={"device_cache": False}).plan(program, on).document()
        step = SMALL.rewrite(program, plan, on).step
        assert step.peak_bytes() <= 3_000_000 < program.step.peak_bytes()
        state = (step.storages.kind == Kind.OPTIMIZER) & (step.storages.tier == Tier.DEVICE)
        weights = sum(int(program.step.storages.bytes[p.storage]) for p in cached)
        assert int(step.storages.bytes[state].sum()) == 2 * weights + 4 * len(
            cached
        )  # two moments and a counter each
        plain = program.step
        all_weights = sum(int(plain.storages.bytes[p.storage]) for p in plain.parameters)
        assert total(step, Resource.DEVICE_TO_HOST) == all_weights - weights
        rest = [p for p in plain.parameters if p.block >= 0][len(cached) :]
        padded = sum(aligned(int(plain.storages.bytes[p.storage])) for p in rest)
        outside = sum(int(plain.storages.bytes[p.storage]) for p in plain.parameters if p.block < 0)
        up = total(step, Resource.HOST_TO_DEVICE) - total(plain, Resource.HOST_TO_DEVICE)
        assert up == padded + outside  # all pages have frames, so each is loaded once
        document = {"settings": settings_of(SMALL), "plan": {"offload.states": plan.document()}}
        session = start_session(Workload.load(ZOO["gpt"]), recording_of(ZOO["gpt"]).rung)
        trace = traced_under(session, load_config(document), 2)
        assert isinstance(trace, Trace)
        assert not compare(step, trace.step)
        got, wanted = train_under(ZOO["gpt"], document), train(ZOO["gpt"])
        assert all(torch.equal(one, other) for one, other in zip(got.losses, wanted.losses, strict=True))
        assert all(torch.equal(got.weights[name], value) for name, value in wanted.weights.items())

    def test_optimizer_state_on_ssd_is_bitwise(self, ssd: Path) -> None:
        """12 bytes per parameter are read and written in a step; pages of weights are in host memory."""
        on_ssd = SMALL.model_copy(update={"optimizer": "ssd"})
        self.check_drift("tied", on_ssd)
        plain, step = rewritten(ZOO["tied"]), rewritten(ZOO["tied"], on_ssd)
        numel = sum(int(plain.storages.bytes[each.gradient]) // 4 for each in plain.parameters)
        assert (
            total(step, Resource.SSD_READ)
            == total(step, Resource.SSD_WRITE)
            == step.peak_bytes(Tier.SSD)
            == 12 * numel
        )
        assert not (
            step.storages.kind[(step.storages.tier == Tier.HOST) & (step.storages.bytes > 4)]
            == Kind.OPTIMIZER
        ).any()
        got, wanted = (without_gradients(train(ZOO["tied"], each)) for each in (on_ssd, NATIVE))
        assert not differences(got, wanted)

    @pytest.mark.slow
    def test_keeping_the_last_step_takes_twice_the_space_for_the_same_traffic(self, ssd: Path) -> None:
        on_ssd = SMALL.model_copy(update={"optimizer": "ssd"})
        keeps = on_ssd.model_copy(update={"resume": "last_step"})
        step, kept = rewritten(ZOO["tied"], on_ssd), rewritten(ZOO["tied"], keeps)
        assert kept.peak_bytes(Tier.SSD) == 2 * step.peak_bytes(Tier.SSD)
        assert total(kept, Resource.SSD_WRITE) == total(step, Resource.SSD_WRITE)
        assert kept.peak_bytes() == step.peak_bytes()
        self.check_drift("tied", keeps)

    def test_pages_are_a_small_part_of_a_block(self) -> None:
        for model in ("tied", "gpt"):
            program = plain_program(ZOO[model])
            page = AngelPtm(kind="angel_ptm").plan(program, target()).page_bytes
            largest = max(block_bytes(program.step))
            assert largest / 16 < page <= largest / 8

    @pytest.mark.parametrize(
        "plan",
        [
            {"page_bytes": PAGE, "frames": 3, "prefetch": [0] * 8},
            {"page_bytes": PAGE, "frames": 40, "prefetch": [1]},
        ],
    )
    def test_apply_refuses_a_plan_of_another_model(self, plan: dict[str, Any]) -> None:
        error = refusal(SMALL, plan)
        assert (type(error), error.code) == (ApplyError, "MT316")
        assert "needs a plan for this model" in str(error)

    def test_apply_refuses_a_missing_plan(self) -> None:
        error = refusal(SMALL, {})
        assert (error.code, error.exit_code) == ("MT316", UsageError.exit_code)
        assert "plan" in str(error)

    def test_fits_refuses_by_name(self) -> None:
        program = plain_program(ZOO["gpt"])
        assert "whole on each, or gathered" in str(SMALL.fits(program, replace(target_of(), ranks=2)))
        assert "compiled" in str(SMALL.fits(program, replace(target_of(), compiled="blocks")))
        assert SMALL.fits(plain_program(ZOO["lora"]), target_of()) is None  # blocks alone are trained
