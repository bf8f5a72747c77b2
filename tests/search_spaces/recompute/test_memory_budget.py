"""Recompute inside compiled graphs: fewer bytes are saved, backward holds forward's ops, results are the same
bits.

Distinguishing test: saved bytes fall with the budget, down to the blocks' inputs, and backward graphs hold
forward's ops.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.zoo_paths import ZOO
from torch import nn

from memtune import hardware
from memtune.api import apply
from memtune.autotune.record.compiled import CompiledRecordings
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.errors import ApplyError
from memtune.program.step import Phase, Step
from memtune.search_spaces.recompute.memory_budget import MemoryBudget
from memtune.technique import NO_PLAN, Exactness, Target
from memtune.testing.drift_check import plain_program, recording_of, target_of
from memtune.testing.training import build, one_step
from memtune.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
COMPILED = CompiledRecordings(Workload.load(ZOO["gpt"]))


def step_at(budget: float) -> Step:
    rewriter = Rewriter(recording_of(ZOO["gpt"]), Target(hardware.detect("cpu")), compiled=COMPILED)
    recompute = {"kind": "memory_budget", "budget": budget} if budget < 1 else {"kind": "none"}
    execution = {"micro_batch": 2, "compile": "blocks", "compile_backend": "aot_eager"}
    found = rewriter.candidate(Choice.from_document({"execution": execution, "recompute": recompute}))
    assert isinstance(found, Candidate), found
    return found.program.step


def in_backward(step: Step, name: str) -> int:
    return Counter(step.names[i] for i in step.ops.name[step.ops.phase == Phase.BACKWARD])[name]


def test_smaller_budgets_save_less_and_run_more_again() -> None:
    steps = [step_at(budget) for budget in (1, 0)]
    saved = [step.saved_bytes(1) for step in steps]
    assert (
        saved[1] < 0.25 * saved[0]
    )  # the block's input, and the mask of its dropout, which is never drawn again
    assert steps[0].peak_bytes() > steps[1].peak_bytes()
    again = [in_backward(step, "aten.native_layer_norm.default") for step in steps]
    assert again == [0, 8]  # both of each block
    draws = [sum(step.ops.rng) for step in steps]
    assert draws[0] == draws[1]


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_training_has_the_bits_of_the_plain_model(budget: float) -> None:
    torch._dynamo.reset()
    runs: list[Any] = []
    for recompute in (None, {"kind": "memory_budget", "budget": budget}):
        workload, model, optimizer = build(ZOO["gpt"])
        tuned = None
        if recompute is not None:
            execution = {"compile": "blocks", "compile_backend": "aot_eager"}
            tuned = apply(
                model, optimizer, {"settings": {"execution": execution, "recompute": recompute}}, strict=False
            )
        runs.append([one_step(workload, model, optimizer, tuned, seed=4 + step) for step in range(2)])
    for (loss, gradients), (plain_loss, plain) in zip(*runs, strict=True):
        assert torch.equal(loss, plain_loss)
        assert all(torch.equal(gradients[name], plain[name]) for name in plain)


def test_fits_requires_compiled_graphs() -> None:
    technique = MemoryBudget()
    program = plain_program(ZOO["gpt"])
    assert "only compiled graphs" in str(technique.fits(program, target_of(technique)))
    compiled = Target(hardware.detect("cpu"), compiled="blocks")
    assert technique.fits(program, compiled) is None
    assert "save by default" in str(MemoryBudget(budget=1.0).fits(program, compiled))
    assert technique.rewrite(program, NO_PLAN, compiled) is program
    assert technique.exactness is Exactness.BITWISE
    _, model, optimizer = build(ZOO["tied"])
    with pytest.raises(ApplyError, match=r"MT315 .*only compiled graphs(.|\n)*compile: blocks"):
        apply(model, optimizer, {"settings": {"recompute": {"kind": "memory_budget"}}}, strict=False)


@pytest.mark.slow
def test_inductor_draws_nothing_twice_either() -> None:
    """Without biases the output is linear in the first weight, so weight · gradient is the loss: only if one
    mask served both.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64, bias=False), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 8, bias=False)
    )
    settings = {"execution": {"compile": "model"}, "recompute": {"kind": "memory_budget", "budget": 0.0}}
    tuned = apply(model, torch.optim.SGD(model.parameters(), 0.1), {"settings": settings}, strict=False)
    loss = model(torch.randn(32, 64)).sum()
    loss.backward()
    weight = model[0].weight
    assert torch.allclose((weight * weight.grad).sum(), loss, rtol=1e-3)
    assert tuned.audit()["execution"]["graph_runs"] == 1
