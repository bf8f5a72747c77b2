"""Every technique under a budget that the plain run exceeds: five steps to the bit (lossy techniques: those
without a budget), the predicted peak, no tier fuller.
"""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import pytest
import torch
from support.zoo_paths import ZOO
from torch import nn

from memtune import hardware
from memtune.api import Tuned, apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.config.tuned_config import TunedConfig
from memtune.memory.ledger import Ledger
from memtune.runtime.memory_tiers import HOST, tier
from memtune.search_spaces import kinds
from memtune.ssd import ssd_tensors
from memtune.technique import Target
from memtune.testing.drift_check import recording_of
from memtune.testing.training import SEED, build
from memtune.workload.workload import Workload

MODEL, STEPS, PARTS, NORM = ZOO["gpt"], 5, 2, 0.3
STATES: dict[str, dict[str, Any]] = {
    "optimizer_cpu": {},
    "optimizer_cpu, native": {"update": "native"},
    "optimizer_cpu, per_layer": {"update": "native", "trigger": "per_layer"},
    "zero_offload": {"bucket_mib": 0.005},
    "zero_offload, a part": {"bucket_mib": 0.005, "ratio": 0.5},
    "l2l": {},
    "stronghold": {"window": 2, "deferred": (1, 3)},
    "patrickstar": {"chunk_bytes": 70_000},
    "elixir": {},
    "angel_ptm": {"page_mib": 0.02},
    "angel_ptm, on SSD": {"page_mib": 0.02, "optimizer": "ssd"},
    "zero_infinity": {},
    "zero_infinity, weights on the host": {"parameters": "host"},
    "zero_infinity, all on SSD": {"parameters": "ssd", "gradients": "ssd"},
    "zero_infinity, all on the host": {"optimizer": "host", "parameters": "host"},
    "zero_infinity, all but the optimizer on SSD": {
        "optimizer": "host",
        "parameters": "ssd",
        "gradients": "ssd",
    },
    "lohan": {"bucket_mib": 0.01},
}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "copy_out": {"min_bytes": 0},
    "copy_out, to SSD": {"min_bytes": 0, "target": "ssd"},
    "pipelined": {"min_bytes": 0, "ratio": 0.5},
    "tsplit": {"min_bytes": 64, "share": 0.5, "parts": 1},
    "compressed": {"min_bytes": 0},
}
LOSSY = ("compressed",)
COVERED_BY_OTHER_TESTS = {"none", "harmony", "mobius", "moesys", "smart_infinity", "orchestrated"}
"""Techniques with a run in `layer_major_suite` (chains) or `budget_runs` (experts, updater processes), or for
replicas only.
"""
CLIPPED = ("optimizer_cpu", "optimizer_cpu, native", "zero_infinity", *ACTIVATIONS, "planned")
"""Techniques whose runs clip by norm; those that update blocks inside backward refuse it."""
CASES = [*STATES, *ACTIVATIONS, "planned"]
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("ssd")]


def settings(case: str) -> dict[str, Any]:
    kind = case.partition(",")[0]
    if case == "planned":
        return {"recompute": {"kind": "planned", "share": 0.5}}
    states = case in STATES
    knobs = (STATES if states else ACTIVATIONS)[case]
    return {"offload": {"states" if states else "activations": {"kind": kind, **knobs}}}


@cache
def rewriter() -> Rewriter:
    return Rewriter(recording_of(MODEL), Target(hardware.detect("cpu")))


def candidate(slots: dict[str, Any]) -> tuple[Candidate, int]:
    """Return the rewritten program and its predicted peak."""
    found = rewriter().candidate(
        Choice.from_document({**slots, "execution": {"micro_batch": 2, "accumulate": PARTS}})
    )
    assert isinstance(found, Candidate), found
    return found, simulate(found.program, hardware.detect("cpu")).peak_allocated_bytes


def fused(config: Any) -> tuple[Workload, Tuned]:
    """Return the optimizer with AdamW's fused kernel, which has the bits of the native update."""
    workload, model, _ = build(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return workload, apply(model, optimizer, config, loss=workload.loss, strict=False)


def one_step(workload: Workload, tuned: Tuned, step: int, norm: float) -> float:
    """Run a step of two micro-batches, clipped if there is a norm; return the loss."""
    torch.manual_seed(SEED + step)
    with tier(HOST):
        batches = [workload.make_batch(2) for _ in range(PARTS)]
    if not norm:
        return tuned.step(batches).item()
    total = 0.0
    for index, batch in enumerate(batches):
        with tuned.micro_batch(last=index == PARTS - 1):
            loss = workload.loss(tuned.model, batch) / PARTS
            loss.backward()
            total += loss.item()
    assert nn.utils.clip_grad_norm_(tuned.model.parameters(), norm) > norm
    tuned.optimizer.step()
    tuned.optimizer.zero_grad()
    return total


def trained(config: Any, norm: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of training without a budget."""
    workload, tuned = fused(config)
    return [one_step(workload, tuned, step, norm) for step in range(STEPS)], weights_of(tuned)


def weights_of(tuned: Tuned) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in tuned.state_dict()["model"].items()}


@cache
def plain(norm: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of training without memtune."""
    return trained({"settings": {}}, norm)


def test_techniques_have_a_run_under_budget() -> None:
    named = {case.partition(",")[0] for case in CASES} | COVERED_BY_OTHER_TESTS
    assert {*kinds("offload.states"), *kinds("offload.activations")} <= named


@pytest.mark.native_ledger
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_training_is_bitwise_under_a_budget_that_the_plain_run_exceeds(case: str) -> None:
    """With accumulation, and clipped unless that is refused. After the third step no tier holds more than
    predicted.
    """
    norm = NORM if case in CLIPPED else 0.0
    (found, predicted), (_, whole) = candidate(settings(case)), candidate({})
    config = TunedConfig(settings=found.choice, plan=dict(found.plans))
    losses, weights = trained(config, norm) if case in LOSSY else plain(norm)
    gc.collect()
    empty = Ledger.open("cpu").live_bytes()
    workload, tuned = fused(config)
    gc.collect()  # what it has replaced
    budget, held, got = empty + (predicted + whole) // 2, [], []
    assert predicted < whole
    with Ledger.open("cpu", budget_bytes=budget) as ledger:
        for step in range(STEPS):
            ledger.reset_peak()
            got.append(one_step(workload, tuned, step, norm))
            assert tuned.optimizer.state  # waits for deferred updates
            file = ssd_tensors.opened()
            left = ledger.live_bytes(), ledger.live_bytes(HOST), 0 if file is None else file.used_bytes
            held.append((ledger.peak_allocated_bytes() - empty, *left))
    assert max(peak for peak, *_ in held[2:]) == pytest.approx(predicted, rel=0.02)
    assert held[2][1:] == held[3][1:] == held[4][1:]
    assert got == losses
    assert got[0] == plain(norm)[0][0]  # no technique changes the forward
    assert all(torch.equal(value, weights[name]) for name, value in weights_of(tuned).items())
    assert tuned.audit()
    del tuned
    gc.collect()
    workload, tuned = fused({"settings": {}})
    with Ledger.open("cpu", budget_bytes=budget), pytest.raises(torch.OutOfMemoryError):
        [
            one_step(workload, tuned, step, norm) for step in range(2)
        ]  # the first one makes the optimizer's state
