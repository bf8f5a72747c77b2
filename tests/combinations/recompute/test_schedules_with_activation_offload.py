"""Blocks by schedules whose kept values are offloaded: every op and byte, the tensors offloaded, and refusals
by name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.chain_model import DIM, HEADS, LAYERS, SEQ
from support.suites.layer_major_suite import CHAIN
from support.zoo_paths import ZOO

from memtune.activations.schedules import scheduled_region
from memtune.api import apply
from memtune.errors import ApplyError
from memtune.program.step import Phase, Resource
from memtune.search_spaces import find
from memtune.ssd import offload_dir
from memtune.technique import Technique
from memtune.testing.drift_check import drift, plain_program, planned, target_of
from memtune.testing.training import build, settings_of

SAMPLES = 16
pytestmark = pytest.mark.usefixtures("one_thread")


def recompute(kind: str, **knobs: Any) -> Technique:
    return find("recompute", kind)(kind=kind, **knobs)


def moves(kind: str, **knobs: Any) -> Technique:
    return find("offload.activations", kind)(kind=kind, **knobs)


BOUNDARY, DTR = recompute("attention_boundary"), recompute("dtr", ratio=0.3)
ALL, HALF = moves("copy_out", min_bytes=0), moves("copy_out", min_bytes=0, ratio=0.5)
MOVES = (
    ALL,
    HALF,
    moves("copy_out", min_bytes=0, ratio=0.6, target="ssd"),
    moves("pipelined", ratio=0.5, min_bytes=0),
    moves("tsplit", share=0.5, parts=1, min_bytes=64),
)


@pytest.fixture(autouse=True)
def drive(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))


def test_pass_equals_the_recorded_step() -> None:
    assert drift(CHAIN, BOUNDARY, HALF, micro_batch=SAMPLES) == ""


@pytest.mark.slow
@pytest.mark.parametrize("move", MOVES, ids=lambda each: str(each.kind))
def test_passes_equal_the_recorded_step(move: Technique) -> None:
    assert drift(CHAIN, BOUNDARY, move, micro_batch=SAMPLES) == ""


def test_values_kept_by_schedule_are_offloaded_and_reloaded_once() -> None:
    """Under `attention_boundary`: each block's input, attention's output and log-sum-exp; the scale of all
    blocks once.
    """
    step = planned(CHAIN, BOUNDARY, ALL, micro_batch=SAMPLES)[0].step
    kept_bytes = 4 * (SEQ + LAYERS * SAMPLES * SEQ * (2 * DIM + HEADS))
    for link in (Resource.DEVICE_TO_HOST, Resource.HOST_TO_DEVICE):
        rows = (step.ops.resource == link) & (step.ops.phase < Phase.BOUNDARY) & (step.ops.block >= 0)
        assert int(step.ops.traffic_bytes[rows].sum()) == kept_bytes


@pytest.mark.slow
def test_drift_check_fails_without_claims_on_kept_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mechanism: values kept by a schedule pass through the claims on its block."""
    monkeypatch.setattr(scheduled_region, "hooks_of_table", lambda: None)
    assert drift(CHAIN, BOUNDARY, HALF, micro_batch=SAMPLES) != ""


@pytest.mark.parametrize(
    "again",
    [DTR, recompute("dtr", ratio=0.6, online=True), recompute("checkmate", share=0.3)],
    ids=lambda each: str(each.kind),
)
def test_fits_and_apply_refuse_schedule_of_whole_model(again: Technique) -> None:
    """By `fits`; by `apply` for a config that names both anyway."""
    assert "copy_out moves what each block keeps" in str(
        again.fits(plain_program(CHAIN, SAMPLES), target_of(again, HALF))
    )
    model = ZOO["gpt"]
    plans = planned(model, again, micro_batch=6)[1] | planned(model, HALF, micro_batch=6)[1]
    plan = {slot: each.document() for slot, each in plans.items()}
    workload, module, optimizer = build(model)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ApplyError, match="copy_out moves what each block keeps"):
        apply(
            module,
            optimizer,
            {"settings": settings_of(again, HALF), "plan": plan},
            loss=workload.loss,
            strict=False,
        )
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
