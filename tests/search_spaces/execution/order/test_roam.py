"""Compiled graphs in another order: the peak falls as predicted, results are the same bits, all else is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from zoo_paths import ZOO

from memtune import hardware
from memtune._apply import apply
from memtune.autotune.candidates import Candidate, Choice, Rewriter
from memtune.autotune.compiled import CompiledRecordings
from memtune.config import TunedConfig, dump_yaml, load_config
from memtune.errors import ApplyError
from memtune.program import Step
from memtune.runtime import shim
from memtune.runtime.ledger import Ledger
from memtune.runtime.tiers import HOST, tier
from memtune.search_spaces.execution.order.roam import Roam
from memtune.technique import Exactness, Reason, Target
from memtune.testing.drift import plain_program, recording_of
from memtune.testing.training import build, one_step
from memtune.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
ROAM = Roam()
WIDE = '''
import torch
from torch import nn


class Wide(nn.Module):
    """Makes eight wide tensors before it reads the first one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = nn.functional.dropout(x, 0.5)
        wide = [x.unsqueeze(1) * (x.unsqueeze(2) + i) for i in range(8)]
        return torch.stack([each.mean((1, 2)) for each in wide], 1) * self.weight


def model():
    return Wide()


def batch(size):
    return torch.randn(size, 128)


def loss(model, batch):
    return model(batch).square().mean()
'''
WIDE_BYTES = 4 * 128 * 128  # of one wide tensor and sample


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "model.py"
    path.write_text(WIDE)
    return path


def settings(kind: str, scope: str = "model", backend: str = "aot_eager") -> dict[str, Any]:
    return {"execution": {"micro_batch": 4, "compile": scope, "compile_backend": backend, "order": {"kind": kind}}}


def predicted(path: Path, kind: str) -> Step:
    recordings = CompiledRecordings(Workload.load(path), sizes={4})
    rewriter = Rewriter(recording_of(path), Target(hardware.detect("cpu")), compiled=recordings)
    found = rewriter.candidate(Choice.from_document(settings(kind)))
    assert isinstance(found, Candidate), found
    return found.program.step


def measured(path: Path, kind: str) -> tuple[int, dict[str, Any]]:
    """The peak of the third step by the native ledger, and what the audit says of the order."""
    torch._dynamo.reset()
    with Ledger.open("cpu") as ledger:
        empty = ledger.live_bytes()
        workload, model, optimizer = build(path)
        tuned = apply(model, optimizer, {"settings": settings(kind)}, loss=workload.loss, strict=False)
        for _ in range(3):
            with tier(HOST):
                batches = [workload.make_batch(4)]
            ledger.reset_peak()
            tuned.step(batches)
        return ledger.peak_allocated_bytes() - empty, tuned.audit()


@pytest.mark.skipif(shim.available() is not None, reason="no native ledger here")
def test_the_peak_falls_as_predicted(wide: Path) -> None:
    """The drift test of a compiled technique: the native ledger around real steps against the recorded graphs."""
    plain, plain_facts = measured(wide, "program")
    ordered, facts = measured(wide, "roam")
    assert "execution.order" not in plain_facts
    assert facts["execution.order"]["graphs_lowered"] >= 1
    assert plain - ordered >= 6 * 4 * WIDE_BYTES  # all eight at once before, now one and what is made of it
    assert plain == pytest.approx(predicted(wide, "program").peak_bytes(), rel=0.02)
    assert ordered == pytest.approx(predicted(wide, "roam").peak_bytes(), rel=0.02)


def trained(path: Path, execution: dict[str, Any] | None) -> list[Any]:
    torch._dynamo.reset()
    workload, model, optimizer = build(path)
    tuned = None if execution is None else apply(model, optimizer, {"settings": execution}, strict=False)
    return [one_step(workload, model, optimizer, tuned, seed=4 + step) for step in range(3)]


@pytest.mark.parametrize(("model", "scope"), [("wide", "model"), ("gpt", "blocks")])
def test_the_same_bits_as_the_plain_model(model: str, scope: str, wide: Path) -> None:
    path = wide if model == "wide" else ZOO[model]
    for (loss, gradients), (plain_loss, plain) in zip(trained(path, settings("roam", scope)), trained(path, None), strict=True):
        assert torch.equal(loss, plain_loss)
        assert all(torch.equal(gradients[name], plain[name]) for name in plain)


def test_a_config_holds_it_beside_the_batch() -> None:
    config = load_config({"settings": settings("roam")})
    assert config.settings.technique("execution.order") == ROAM
    assert config.settings.execution.micro_batch == 4
    assert load_config(dump_yaml(config)) == config
    assert load_config({"settings": settings("program")}).settings.techniques == ()
    assert load_config(dump_yaml(TunedConfig())).settings.technique("execution.order").kind == "program"


@pytest.mark.parametrize(
    ("compiled", "backend", "why"),
    [(False, "inductor", "eager code runs in program order"), ("blocks", "inductor", "inductor orders its kernels itself")],
)
def test_programs_that_no_graph_runs_are_refused(compiled: Any, backend: str, why: str) -> None:
    target = Target(hardware.detect("cpu"), compiled=compiled, compile_backend=backend)
    reason = ROAM.fits(plain_program(ZOO["gpt"]), target)
    assert isinstance(reason, Reason)
    assert why in reason.text
    assert (
        ROAM.fits(plain_program(ZOO["gpt"]), Target(hardware.detect("cpu"), compiled="blocks", compile_backend="aot_eager"))
        is None
    )
    execution = {"order": {"kind": "roam"}} | ({"compile": compiled} if compiled else {})
    _, model, optimizer = build(ZOO["tied"])
    before = dict(vars(model))
    with pytest.raises(ApplyError, match=r"MT315 (.|\n)*aot_eager"):
        apply(model, optimizer, {"settings": {"execution": execution}}, strict=False)
    assert vars(model) == before
    assert ROAM.exactness is Exactness.BITWISE
