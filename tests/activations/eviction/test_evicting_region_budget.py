"""Budgets of online eviction: `fits`, a ledger and the runtime's rematerializer agree on each budget."""

from __future__ import annotations

import gc
import re
from typing import Any

import pytest
import torch
from support.zoo_paths import ZOO

from memtune.activations.schedules.region_pass import region_of
from memtune.api import apply
from memtune.autotune.record.recorder import record
from memtune.errors import ApplyError
from memtune.memory.ledger import Ledger
from memtune.memory.workspace import WorkspaceTable
from memtune.program.edit import accumulate_gradients
from memtune.program.step import Program, RankClass, Step, Tier
from memtune.runtime.memory_tiers import HOST
from memtune.search_spaces.recompute._schedule_planner.online_budget import (
    online_plan_fields,
    online_shortfall,
)
from memtune.search_spaces.recompute.coop import Coop
from memtune.search_spaces.recompute.dtr import Dtr
from memtune.search_spaces.recompute.megtaichi import Megtaichi
from memtune.technique import Plan, Technique
from memtune.testing.drift_check import plain_program, recording_of, target_of
from memtune.testing.training import build, settings_of
from memtune.workload.workload import Workload

BUDGETS = {
    "moe": (24, Dtr(ratio=0.75)),  # its ops depend on the data
    "tied": (16, Megtaichi(ratio=0.45, online=True)),  # the gradient that flows in is a sixth of the budget
    "cnn_bn": (8, Coop(ratio=0.6, online=True)),  # held values split the arena into short runs
    "lstm": (16, Dtr(ratio=0.4, online=True)),  # kernels take scratch, when they run again too
}


def measured(
    name: str, size: int, technique: Technique, steps: int, exactly: bool = False
) -> tuple[Plan, Step, int, dict[str, Any]]:
    """Return the plan for a step with its kernels' scratch, that step, the ledger's peak under the plan, and
    the audit.
    """
    step = record(
        Workload.load(ZOO[name]), sizes=[size] * exactly, workspace=WorkspaceTable.cached(threads=1)
    ).at(size)
    program, target = Program((RankClass(1, step),), size), target_of(technique)
    assert technique.fits(program, target) is None
    plan = technique.plan(program, target)
    ledger, threads = Ledger.open("cpu"), torch.get_num_threads()
    torch.set_num_threads(1)  # kernels of convolutions take more scratch on more of them
    try:
        gc.collect()
        empty = ledger.live_bytes()
        ledger.reset_peak()
        workload, model, optimizer = build(ZOO[name])
        config = {"settings": settings_of(technique), "plan": {"recompute": plan.document()}}
        tuned = apply(model, optimizer, config, strict=False)
        for _ in range(steps):
            batch = workload.make_batch(size)
            workload.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            del batch
        return plan, step, ledger.peak_allocated_bytes() - empty, tuned.audit()["recompute"]
    finally:
        torch.set_num_threads(threads)
        ledger.close()


@pytest.mark.native_ledger
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "tied" else pytest.mark.slow) for name in BUDGETS]
)
def test_ledger_peak_is_within_the_budget(name: str) -> None:
    size, technique = BUDGETS[name]
    plan, step, peak_bytes, audit = measured(name, size, technique, steps=5, exactly=name != "moe")
    budget_bytes = plan.online.budget_bytes
    assert plan.peak_bytes <= budget_bytes < step.peak_bytes()
    assert peak_bytes <= budget_bytes
    predicted = technique.rewrite(
        Program((RankClass(1, step),), size), plan, target_of(technique)
    ).step.peak_bytes()
    assert peak_bytes == pytest.approx(predicted, rel=0.02)
    assert audit["online_replays"] > 0
    assert (audit["frozen_runs"] > 0) == (name != "moe"), audit["why_online"]


@pytest.mark.native_ledger
def test_random_states_on_the_host_match_the_prediction() -> None:
    """Each op that draws keeps a state under online eviction.

    A little less, where what was made goes before backward ends.
    """
    technique = Dtr(ratio=0.5, online=True, freeze_after=0)
    program, target = plain_program(ZOO["gpt"], 2), target_of(technique)
    plan = technique.plan(program, target)
    predicted = technique.rewrite(program, plan, target).step.peak_bytes(Tier.HOST)
    ledger = Ledger.open("cpu")
    try:
        workload, model, optimizer = build(ZOO["gpt"])
        apply(
            model,
            optimizer,
            {"settings": settings_of(technique), "plan": {"recompute": plan.document()}},
            strict=False,
        )
        gc.collect()
        empty = ledger.live_bytes(HOST)
        ledger.reset_peak()
        for _ in range(3):
            workload.loss(model, workload.make_batch(2)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        n_bytes = ledger.peak_allocated_bytes(HOST) - empty
    finally:
        ledger.close()
    assert int((program.step.ops.rng > 0).sum()) > 5
    assert 0.8 * predicted <= n_bytes <= predicted


@pytest.mark.slow
@pytest.mark.native_ledger
@pytest.mark.parametrize("freeze_after", [0, 3])
@pytest.mark.parametrize("ratio", [0.4, 0.6])
@pytest.mark.parametrize("kind", [Dtr, Coop, Megtaichi])
@pytest.mark.parametrize(("name", "size"), [("cnn_bn", 8), ("lstm", 16)])
def test_accounted_peak_equals_ledger_and_prediction(
    name: str, size: int, kind: type[Dtr | Coop | Megtaichi], ratio: float, freeze_after: int
) -> None:
    """Scratch depends on each op's reads; the first step has no optimizer state; the peak is never above the
    budget.
    """
    technique = kind(ratio=ratio, online=True, freeze_after=freeze_after)
    plan, step, peak_bytes, audit = measured(
        name, size, technique, steps=5 if freeze_after else 2, exactly=True
    )
    online = plan.online
    assert peak_bytes <= online.budget_bytes
    assert peak_bytes == pytest.approx(audit["online_peak_bytes"], abs=64)  # what the ledger counts of itself
    assert online.peak_bytes == audit["online_peak_bytes"]
    predicted = technique.rewrite(
        Program((RankClass(1, step),), size), plan, target_of(technique)
    ).step.peak_bytes()
    assert peak_bytes == pytest.approx(predicted, rel=0.02)


@pytest.mark.slow
@pytest.mark.native_ledger
def test_schedule_peak_includes_scratch_of_recurrent_kernels() -> None:
    plan, _, peak_bytes, audit = measured("lstm", 16, Dtr(ratio=0.6), steps=2, exactly=True)
    assert audit["plain_runs"] == 0
    assert 0.99 * plan.peak_bytes < peak_bytes <= plan.peak_bytes


def test_offline_policy_refuses_data_dependent_ops_by_name() -> None:
    technique = Dtr(ratio=0.75, online=False)
    assert "nonzero" in str(technique.fits(plain_program(ZOO["moe"], 24), target_of(technique)))


def trains(name: str, technique: Dtr | Coop | Megtaichi, online: dict[str, Any], accumulate: int) -> bool:
    """Return whether two steps of four samples per micro-batch run under the online plan, without a budget
    error.
    """
    workload, model, optimizer = build(ZOO[name])
    online = {"peak_bytes": 0, **online} if isinstance(online, dict) else online.model_dump()
    empty = {
        "schedule": {"graph": "", "forward": [], "backward": []},
        "peak_bytes": 0,
        "plain_bytes": 0,
        "recompute_s": 0.0,
    }
    plan = {"recompute": {"online": online, **empty}}
    apply(model, optimizer, {"settings": settings_of(technique), "plan": plan}, strict=False)
    try:
        for _ in range(2):
            for _ in range(accumulate):
                workload.loss(model, workload.make_batch(4)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    except ApplyError as error:
        if error.code != "MT337":
            raise
        return False
    return True


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", [Dtr, Coop, Megtaichi])
@pytest.mark.parametrize(
    ("name", "accumulate"), [("autocast", 2), ("lstm", 1), ("lstm", 2), ("cnn_bn", 1), ("tied", 1)]
)
def test_fits_agrees_with_training_around_the_least_budget(
    kind: type[Dtr | Coop | Megtaichi], name: str, accumulate: int
) -> None:
    """Budgets on both sides of the least one.

    What Python holds (autocast's casts of weights, say) is no policy's to evict.
    """
    step = recording_of(ZOO[name]).at(4)
    step = accumulate_gradients(step) if accumulate > 1 else step
    hardware = target_of(kind(ratio=0.5)).hardware
    told, region = online_plan_fields(step, hardware), region_of(step)
    assert not isinstance(region, str)
    reason = online_shortfall(step, kind().policy(), int(region.background_bytes[0]) + 1, hardware)
    assert reason is not None
    least = int(reason.fix.split(",")[0].removeprefix("budget_bytes: "))
    for budget_bytes, enough in ((least, True), (least - max(step.peak_bytes() // 500, 2), False)):
        technique = kind(budget_bytes=budget_bytes, online=True, freeze_after=0)
        assert (online_shortfall(step, technique.policy(), budget_bytes, hardware) is None) == enough
        assert trains(name, technique, {"budget_bytes": budget_bytes, **told}, accumulate) == enough


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", [Dtr, Coop, Megtaichi])
@pytest.mark.parametrize("name", ["lstm", "cnn_bn"])
def test_online_region_trains_at_the_least_schedule_budget(
    kind: type[Dtr | Coop | Megtaichi], name: str
) -> None:
    technique = kind(ratio=0.0, online=True)
    program, target = plain_program(ZOO[name], 4), target_of(technique)
    assert technique.fits(program, target) is None
    assert trains(name, technique, technique.plan(program, target).online, 1)


def test_budget_met_by_a_schedule_only_is_refused_with_a_sufficient_one() -> None:
    step = accumulate_gradients(recording_of(ZOO["autocast"]).at(4))
    program, technique = Program((RankClass(1, step),), 4, accumulate=2), Dtr(ratio=0.05, online=True)
    reason = technique.fits(program, target_of(technique))
    assert "deciding while the model runs does not stay within" in str(reason)
    assert "are enough" in str(reason)
    made_before = Dtr(ratio=0.05, online=False)
    assert made_before.fits(program, target_of(made_before)) is None


def test_budget_of_the_refusal_suffices_online() -> None:
    """Both the policy's schedule and the runtime meet it."""
    step = accumulate_gradients(recording_of(ZOO["autocast"]).at(4))
    program = Program((RankClass(1, step),), 4, accumulate=2)
    technique = Dtr(budget_bytes=step.peak_bytes() // 4, online=True)
    reason = str(technique.fits(program, target_of(technique)))
    enough = re.search(r"budget_bytes: (\d+)", reason)
    assert enough is not None, reason
    technique = Dtr(budget_bytes=int(enough[1]), online=True)
    assert technique.fits(program, target_of(technique)) is None


RATIOS = (0.05, 0.07, 0.1, 0.125, 0.15, 0.2)
EVERY = [
    (kind, accumulate, ratio)
    for kind in (Dtr, Coop, Megtaichi)
    for accumulate in (1, 2, 4)
    for ratio in RATIOS
]
USUAL = [(Coop, 2, 0.1), (Dtr, 4, 0.125)]


@pytest.mark.parametrize(
    ("kind", "accumulate", "ratio"),
    [pytest.param(*each, marks=[] if each in USUAL else pytest.mark.slow) for each in EVERY],
)
def test_fitting_budget_trains_under_any_accumulation(
    kind: type[Dtr | Coop | Megtaichi], accumulate: int, ratio: float
) -> None:
    """Tight budgets in which values changed in place (dropout's masks) are recomputed and an incoming
    gradient is freed.
    """
    step = recording_of(ZOO["gpt"]).at(2)
    program = Program(
        (RankClass(1, accumulate_gradients(step) if accumulate > 1 else step),), 2, accumulate=accumulate
    )
    technique = kind(ratio=ratio, online=True)
    if (reason := technique.fits(program, target_of(technique))) is not None:
        assert ratio < 0.15, reason
        pytest.skip(str(reason))
    plan = technique.plan(program, target_of(technique))
    workload, model, optimizer = build(ZOO["gpt"])
    tuned = apply(
        model,
        optimizer,
        {"settings": settings_of(technique), "plan": {"recompute": plan.document()}},
        strict=False,
    )
    for _ in range(2):
        for _ in range(accumulate):
            workload.loss(model, workload.make_batch(2)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert tuned.audit()["recompute"]["online_peak_bytes"] <= plan.online.budget_bytes
