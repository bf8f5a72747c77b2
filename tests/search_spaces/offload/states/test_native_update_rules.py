"""Optimizers that the native update does not support are refused before a run, with the error of apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.config.tuned_config import load_config
from memtune.errors import ApplyError
from memtune.program.step import Recording
from memtune.technique import Reason, Target
from memtune.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread", "ssd")
NATIVE: tuple[dict[str, Any], ...] = (
    {"kind": "optimizer_cpu", "update": "native"},
    {"kind": "zero_offload"},
    {"kind": "lohan"},
    {"kind": "zero_infinity"},
    {"kind": "smart_infinity"},
    {"kind": "l2l"},
    {"kind": "stronghold"},
    {"kind": "angel_ptm", "optimizer": "ssd"},
    {"kind": "harmony"},
)
OWN: tuple[dict[str, Any], ...] = ({"kind": "optimizer_cpu"}, {"kind": "patrickstar"}, {"kind": "angel_ptm"})
MODEL = """
import sys
sys.path.insert(0, {folder!r})
from tied import batch, loss, model
import torch
class Mine(torch.optim.SGD):
    pass
def optimizer(params):
    return {optimizer}
"""


def recorded(folder: Path, optimizer: str) -> tuple[Workload, Recording]:
    (folder / "model.py").write_text(MODEL.format(folder=str(Path(ZOO["tied"]).parent), optimizer=optimizer))
    workload = Workload.load(folder / "model.py")
    return workload, record(workload)


def settings(states: dict[str, Any]) -> dict[str, Any]:
    return {"execution": {"micro_batch": 2, "accumulate": 1}, "offload": {"states": states}}


@pytest.mark.parametrize(
    "optimizer", ["torch.optim.Adam(params, weight_decay=0.1)", "Mine(params, lr=0.1, momentum=0.9)"]
)
def test_optimizer_without_a_native_update_is_refused_by_name(tmp_path: Path, optimizer: str) -> None:
    workload, recording = recorded(tmp_path, optimizer)
    rewriter = Rewriter(recording, Target(hardware.detect("cpu"), 1, recording.step.peak_bytes() * 4))
    for states in NATIVE:
        refused = rewriter.candidate(Choice.from_document(settings(states)))
        assert isinstance(refused, Reason), states
        assert "native update" in refused.text, (states, refused)
    for states in OWN:
        found = rewriter.candidate(Choice.from_document(settings(states)))
        assert isinstance(found, Candidate), (states, found)
        model = workload.build_model()
        config = load_config({"settings": settings(states)}).model_copy(update={"plan": dict(found.plans)})
        apply(model, workload.make_optimizer(model), config, strict=False)
    model = workload.build_model()
    with pytest.raises(ApplyError, match="native update"):
        apply(
            model,
            workload.make_optimizer(model),
            {"settings": settings(NATIVE[0])},
            strict=False,
        )


def test_custom_optimizer_is_not_split(tmp_path: Path) -> None:
    _, recording = recorded(tmp_path, "Mine(params, lr=0.1, momentum=0.9)")
    rewriter = Rewriter(recording, Target(hardware.detect("cpu"), 1, None))
    roam = {"execution": {"micro_batch": 2, "accumulate": 1, "order": {"kind": "roam"}}}
    for document in (roam, settings({"kind": "zero_offload", "ratio": 0.5})):
        refused = rewriter.candidate(Choice.from_document(document))
        assert isinstance(refused, Reason)
        assert "Mine is none that is known to update parameters one by one" in refused.text
