"""Pages of weights: which lie where, when each comes in, what crosses the link and what is there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from layers_suite import NATIVE, OWN, LayersSuite, block_bytes, total, without_gradients
from zoo_paths import ZOO

from memtune._apply import Tuned, apply
from memtune.autotune.dry_run import traced_under
from memtune.autotune.record import Trace, start_session
from memtune.autotune.simulate import simulate
from memtune.chunks import aligned
from memtune.config import load_config
from memtune.errors import ApplyError
from memtune.pages import Pages, loads_of, paged, timeline
from memtune.passes.stream import moment_of_ops, sizes_in_blocks
from memtune.program import Kind, Phase, Program, Resource, Step, Tier
from memtune.runtime.let_go import are_back
from memtune.runtime.lock_free import LockFreeOptimizer
from memtune.runtime.loop import accumulate
from memtune.search_spaces.offload.states.angel_ptm import AngelPtm
from memtune.technique import Exactness, Target
from memtune.testing import rewritten
from memtune.testing.drift import compare, drift, plain_program, recording_of, target_of
from memtune.testing.training import SEED, build, config_of, differences, one_step, settings_of, train, train_under
from memtune.workload import Workload

SMALL = AngelPtm(kind="angel_ptm", page_mib=0.01)
JUST_IN_TIME = SMALL.model_copy(update={"moves": "just_in_time"})
LOCK_FREE = SMALL.model_copy(update={"lock_free": True, "max_staleness": 2})
PAGE, BUDGET_BYTES = 10_240, 2_000_000


def target(technique: AngelPtm = SMALL, up_bytes_per_s: float = 1e10) -> Target:
    """A budget below what the plain gpt takes."""
    plain = target_of(technique)
    return replace(plain, budget_bytes=BUDGET_BYTES, hardware=replace(plain.hardware, host_to_device_bytes_per_s=up_bytes_per_s))


def under_budget(technique: AngelPtm, on: Target) -> tuple[Program, Pages, tuple[int, ...]]:
    """The gpt, its pages, and how many of them come in beside each moment."""
    program = plain_program(ZOO["gpt"])
    plan = technique.plan(program, on)
    decisions = plan.decisions
    pages = paged(*sizes_in_blocks(program.step), decisions["page_bytes"], decisions["frames"])
    return technique.rewrite(program, plan, on), pages, tuple(decisions["ahead"])


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def sum_of(gradients: list[torch.Tensor]) -> torch.Tensor | None:
    """In the order of delivery."""
    total = gradients[0].clone() if gradients else None
    for each in gradients[1:]:
        assert total is not None
        total.add_(each)
    return total


def copies(step: Step) -> np.ndarray[Any, Any]:
    """The ops that bring pages in."""
    ops = np.unique(step.producer[(step.kind == Kind.COMMUNICATION) & (step.bytes == 0)])
    assert (step.op_resource[ops] == Resource.HOST_TO_DEVICE).all()
    return ops


@contextmanager
def observed(gated: bool) -> Iterator[list[int]]:
    """The number of steps in each sweep inside; `gated`: none ends before training waits for it."""
    gate, sweeps = threading.Event(), []
    run, take_up = LockFreeOptimizer._sweep_over, LockFreeOptimizer._take_up

    def gated_run(self: LockFreeOptimizer, steps: list[Any], groups: Any) -> None:
        sweeps.append(len(steps))
        assert not gated or gate.wait(60)
        run(self, steps, groups)

    def opening(self: LockFreeOptimizer, *, wait: bool) -> None:
        if wait:
            gate.set()
        take_up(self, wait=wait)
        gate.clear()

    with patch.object(LockFreeOptimizer, "_sweep_over", gated_run), patch.object(LockFreeOptimizer, "_take_up", opening):
        yield sweeps


def gradients_at(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Of one step of the plain model with these weights."""
    workload, model, _ = build(ZOO["tied"])
    model.load_state_dict(weights)
    torch.manual_seed(seed)
    accumulate(model, workload.loss, [workload.make_batch(2) for _ in range(2)], torch.device("cpu"))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class TestAngelPtm(LayersSuite):
    technique = AngelPtm
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "tied")}
    variants = (SMALL, AngelPtm(kind="angel_ptm"))
    quick = ("tied",)
    update = OWN

    def sabotage(self, tuned: Tuned) -> bool:
        parameter = next(tuned._context.model.get_submodule(tuned._context.blocks[0]).parameters())
        are_back([parameter])
        parameter.data = parameter.detach().clone()
        return True

    def test_a_block_is_there_in_part(self) -> None:
        """The mechanism (pages): at the turn frames hold some pages of a parameter and not the others, which come in alone."""
        program, pages, _ = under_budget(SMALL, target())
        assert pages.page_bytes == PAGE
        room = BUDGET_BYTES - max(self._beside(program.step, pages))
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
        assert len(loads.page) < 2 * pages.count  # whole blocks, as the window of `stronghold`, would move more

    def _beside(self, step: Step, pages: Pages) -> np.ndarray[Any, Any]:
        frames = (step.kind == Kind.COMMUNICATION) & (step.bytes == pages.frame_bytes)
        assert frames.sum() == 1
        live: np.ndarray[Any, Any] = replace(step, tier=np.where(frames, np.uint8(Tier.SSD), step.tier)).live_bytes()
        return live[moment_of_ops(step) >= 0]

    def test_bytes_of_every_link_are_those_of_the_pages_that_come_in(self) -> None:
        program, pages, ahead = under_budget(SMALL, target())
        plain = rewritten(ZOO["gpt"])
        moved = sum(pages.filled[page] for comes in timeline(pages, ahead).loads for page in comes)
        assert moved < 2 * sum(pages.filled)
        outside = sum(int(plain.bytes[p.storage]) for p in plain.parameters if p.block < 0)
        weights = sum(int(plain.bytes[p.storage]) for p in plain.parameters)
        batch = total(plain, Resource.HOST_TO_DEVICE)
        assert total(program.step, Resource.HOST_TO_DEVICE) - batch == moved + outside
        assert total(program.step, Resource.DEVICE_TO_HOST) == weights

    def test_one_schedule_of_moves_and_computations(self) -> None:
        """The mechanism (the unified schedule): what computation hides is not waited for; just in time, all is."""
        found: dict[str, float] = {}
        for technique in (SMALL, JUST_IN_TIME):
            program, pages, ahead = under_budget(technique, target(technique))
            apart = replace(target().hardware, device="cuda", launch_s=0.0)  # a CPU's copies need the cores that compute
            found[technique.moves] = simulate(program, apart, level="events").step_s
            step, moment = program.step, moment_of_ops(program.step)
            ops, loads = copies(step), loads_of(pages)
            n_bytes = step.op_traffic_bytes[ops]
            assert len(ops) < len(loads.page)  # pages side by side are one copy
            beside = step.op_prefetch[ops] == 1
            if technique is JUST_IN_TIME:
                assert not beside.any()
                assert set(ahead) == {0}
            else:  # only what has no free frame before is waited for, and what the first block needs
                waited = loads.page[(loads.opens >= loads.needed) | (loads.needed == 0)].tolist()
                assert n_bytes[~beside].sum() == sum(pages.filled[page] for page in waited)
                per_moment = np.bincount(np.maximum(moment[ops[beside]], 0), n_bytes[beside], len(ahead))
                assert (per_moment <= np.asarray(ahead) * PAGE).all()
                assert (per_moment > 0).sum() > 3
        assert found["scheduled"] < found["just_in_time"]

    def test_a_slow_link_has_what_it_cannot_hide_waited_for(self) -> None:
        _, pages, ahead = under_budget(SMALL, target(up_bytes_per_s=1e3))
        assert sum(ahead) <= len(ahead)
        late = sum(
            sum(page in used for page in comes) for used, comes in zip(pages.uses(), timeline(pages, ahead).loads, strict=False)
        )
        assert late >= len(loads_of(pages).page) - len(ahead)

    def test_a_plan_for_a_budget_trains_to_the_same_bits(self) -> None:
        plan = SMALL.plan(plain_program(ZOO["gpt"]), target()).decisions
        document = {"settings": settings_of(SMALL), "plan": {"offload.states": plan}}
        got, wanted = train_under(ZOO["gpt"], document, steps=5), train(ZOO["gpt"], steps=5)
        assert all(np.array_equal(one, other) for one, other in zip(got.losses, wanted.losses, strict=True))
        assert all(np.array_equal(got.weights[name], value) for name, value in wanted.weights.items())

    def test_spare_memory_caches_optimizer_state_that_is_updated_on_the_device(self) -> None:
        """The mechanism (the cache): of the first parameters neither weight nor gradient crosses the link, to the same bits."""
        program, on = plain_program(ZOO["gpt"]), replace(target(), budget_bytes=3_000_000)
        plan = SMALL.plan(program, on)
        cached = [p for p in program.step.parameters if p.block >= 0][: plan.decisions["cached"]]
        assert cached
        assert "cached" not in SMALL.model_copy(update={"device_cache": False}).plan(program, on).decisions
        step = SMALL.rewrite(program, plan, on).step
        assert step.peak_bytes() <= 3_000_000 < program.step.peak_bytes()
        state = (step.kind == Kind.OPTIMIZER) & (step.tier == Tier.DEVICE)
        weights = sum(int(program.step.bytes[p.storage]) for p in cached)
        assert int(step.bytes[state].sum()) == 2 * weights + 4 * len(cached)  # two moments and a counter each
        plain = program.step
        all_weights = sum(int(plain.bytes[p.storage]) for p in plain.parameters)
        assert total(step, Resource.DEVICE_TO_HOST) == all_weights - weights
        rest = [p for p in plain.parameters if p.block >= 0][len(cached) :]
        padded = sum(aligned(int(plain.bytes[p.storage])) for p in rest)
        outside = sum(int(plain.bytes[p.storage]) for p in plain.parameters if p.block < 0)
        up = total(step, Resource.HOST_TO_DEVICE) - total(plain, Resource.HOST_TO_DEVICE)
        assert up == padded + outside  # all pages have frames, so each comes in once
        document = {"settings": settings_of(SMALL), "plan": {"offload.states": plan.decisions}}
        session = start_session(Workload.load(ZOO["gpt"]), recording_of(ZOO["gpt"]).rung)
        trace = traced_under(session, load_config(document), 2)
        assert isinstance(trace, Trace)
        assert not compare(step, trace.step)
        got, wanted = train_under(ZOO["gpt"], document), train(ZOO["gpt"])
        assert all(torch.equal(one, other) for one, other in zip(got.losses, wanted.losses, strict=True))
        assert all(torch.equal(got.weights[name], value) for name, value in wanted.weights.items())

    def test_optimizer_state_on_ssd_has_the_same_bits(self, ssd: Path) -> None:
        """12 bytes per parameter are read and written in a step; pages of weights stay on the host."""
        on_ssd = SMALL.model_copy(update={"optimizer": "ssd"})
        self.check_drift("tied", on_ssd)
        plain, step = rewritten(ZOO["tied"]), rewritten(ZOO["tied"], on_ssd)
        numel = sum(int(plain.bytes[each.gradient]) // 4 for each in plain.parameters)
        assert total(step, Resource.SSD_READ) == total(step, Resource.SSD_WRITE) == step.peak_bytes(Tier.SSD) == 12 * numel
        assert not (step.kind[(step.tier == Tier.HOST) & (step.bytes > 4)] == Kind.OPTIMIZER).any()
        got, wanted = (without_gradients(train(ZOO["tied"], each)) for each in (on_ssd, NATIVE))
        assert not differences(got, wanted)

    @pytest.mark.slow
    def test_the_last_step_is_kept_in_twice_the_space_for_the_same_traffic(self, ssd: Path) -> None:
        on_ssd = SMALL.model_copy(update={"optimizer": "ssd"})
        keeps = on_ssd.model_copy(update={"resume": "last_step"})
        step, kept = rewritten(ZOO["tied"], on_ssd), rewritten(ZOO["tied"], keeps)
        assert kept.peak_bytes(Tier.SSD) == 2 * step.peak_bytes(Tier.SSD)
        assert total(kept, Resource.SSD_WRITE) == total(step, Resource.SSD_WRITE)
        assert kept.peak_bytes() == step.peak_bytes()
        self.check_drift("tied", keeps)

    def test_pages_are_no_large_part_of_a_block(self) -> None:
        for model in ("tied", "gpt"):
            program = plain_program(ZOO[model])
            page = AngelPtm(kind="angel_ptm").plan(program, target()).decisions["page_bytes"]
            largest = max(block_bytes(program.step))
            assert largest / 16 < page <= largest / 8

    @pytest.mark.parametrize("gated", [True, False])
    def test_lock_free_is_adam_without_locks_in_the_order_of_delivery(self, gated: bool) -> None:
        """The mechanism (the updater): each sweep applies the sum of what was delivered, training uses the version at hand."""
        with observed(gated) as sweeps:
            workload, model, optimizer = build(ZOO["tied"])
            tuned = apply(model, optimizer, config_of(ZOO["tied"], LOCK_FREE), strict=False)
            used, largest = [], 0
            for step in range(7):
                used.append(tuned.audit()["offload.states"]["version"])
                one_step(workload, model, optimizer, tuned, seed=SEED + step)
            largest = tuned.audit()["offload.states"]["largest_staleness"]
            found = tuned.state_dict()["model"]
        _, reference, by_hand = build(ZOO["tied"])
        apply(reference, by_hand, config_of(ZOO["tied"], NATIVE), strict=False)
        versions, delivered = [snapshot(reference)], []
        for step in range(7 + len(sweeps)):
            if step < 7:
                applied = sum(sweeps[: used[step]])
                assert step - applied <= LOCK_FREE.max_staleness
            while len(versions) <= (used[step] if step < 7 else len(sweeps)):
                done = sum(sweeps[: len(versions) - 1])
                together = delivered[done : done + sweeps[len(versions) - 1]]
                for name, parameter in reference.named_parameters():
                    parameter.grad = sum_of([each[name] for each in together if name in each])
                by_hand.step()
                by_hand.zero_grad()
                versions.append(snapshot(reference))
            if step < 7:
                delivered.append(gradients_at(versions[used[step]], SEED + step))
        assert sum(sweeps) == 7
        assert all(torch.equal(found[name], value) for name, value in versions[-1].items())
        assert not gated or (largest == LOCK_FREE.max_staleness and max(sweeps) > 1)

    @pytest.mark.parametrize("model", ["tied", pytest.param("gpt", marks=pytest.mark.slow)])
    def test_a_sweep_runs_beside_the_step_that_follows(self, model: str) -> None:
        assert not drift(ZOO[model], LOCK_FREE)
        step = rewritten(ZOO[model], LOCK_FREE)
        updates = np.flatnonzero(step.op_name == step.names.index("memtune.host_update_.default"))
        assert len(updates)
        assert updates[-1] < np.flatnonzero(step.op_phase == Phase.FORWARD)[0]
        assert (LOCK_FREE.exactly(), SMALL.exactly()) == (Exactness.LOSSY, Exactness.REORDERED)

    @pytest.mark.slow
    def test_stale_weights_reach_about_the_same_loss(self) -> None:
        found, wanted = (train(ZOO["gpt"], each, steps=20).losses for each in (LOCK_FREE, NATIVE))
        assert float(sum(found[-4:])) == pytest.approx(float(sum(wanted[-4:])), rel=0.02)

    @pytest.mark.parametrize(
        "plan",
        [{}, {"page_bytes": PAGE, "frames": 3, "ahead": [0] * 8}, {"page_bytes": PAGE, "frames": 40, "ahead": [1]}],
    )
    def test_a_plan_for_another_model_is_refused(self, plan: dict[str, Any]) -> None:
        _, model, optimizer = build(ZOO["gpt"])
        with pytest.raises(ApplyError, match="no plan for") as caught:
            apply(model, optimizer, {"settings": settings_of(SMALL), "plan": {"offload.states": plan}}, strict=False)
        assert caught.value.code == "MT364"

    def test_what_it_cannot_do_is_refused(self) -> None:
        program = plain_program(ZOO["gpt"])
        assert "whole on each, or gathered" in str(SMALL.fits(program, replace(target_of(), ranks=2)))
        assert "compiled" in str(SMALL.fits(program, replace(target_of(), compiled="blocks")))
        assert "outside of the blocks" in str(SMALL.fits(plain_program(ZOO["lora"]), target_of()))
