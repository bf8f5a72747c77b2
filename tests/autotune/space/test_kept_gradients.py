"""`zero_grad_to_none = False`: gradients outlive the step, in the program and in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Choice, Rewriter
from memtune.errors import WorkloadError
from memtune.hardware.spec import detect
from memtune.program.step import Program
from memtune.runtime.training_step import train_step
from memtune.search_spaces.execution import Execution
from memtune.technique import Target
from memtune.workload.workload import Workload

WIDTH, LAYERS, SAMPLES = 32, 4, 512
MODEL = f"""
import torch
from torch import nn
def block(): return nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.GELU())
def model(): return nn.Sequential(*(block() for _ in range({LAYERS})))
def batch(size): return torch.randn(size, {WIDTH})
def loss(model, batch): return model(batch).square().mean()
"""


def workload(folder: Path, setting: str) -> Workload:
    path = folder / "model.py"
    path.write_text(f"{MODEL}\nzero_grad_to_none = {setting}\n")
    return Workload.load(path)


def peak_bytes(made: Workload) -> int:
    rewriter = Rewriter(record(made), Target(detect("cpu")))
    program = rewriter.program(Choice(Execution(micro_batch=SAMPLES), ()))
    assert isinstance(program, Program)
    return program.step.peak_bytes()


def test_gradients_that_are_zeroed_in_place_are_live_in_forward(tmp_path: Path) -> None:
    gradients = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    assert peak_bytes(workload(tmp_path, "False")) - peak_bytes(workload(tmp_path, "True")) == gradients


@pytest.mark.parametrize("setting", ["False", "True"])
def test_step_zeroes_or_frees_gradients(tmp_path: Path, setting: str) -> None:
    made = workload(tmp_path, setting)
    model = made.build_model()
    optimizer = made.make_optimizer(model)
    train_step(model, optimizer, made.loss, [made.make_batch(2)], torch.device("cpu"))
    gradients = [each.grad for each in model.parameters()]
    if setting == "True":
        assert gradients == [None] * len(gradients)
    else:
        assert all(each is not None and not each.any() for each in gradients)


def test_setting_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="neither True nor False"):
        workload(tmp_path, "'no'")
