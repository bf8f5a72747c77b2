"""Ops that autograd runs in place without a dispatch mode, compared with the native ledger to the byte."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from memtune.autotune.record.recorder import record
from memtune.autotune.record.recording_session import SEED
from memtune.memory import cpu_allocator
from memtune.memory.workspace import WorkspaceTable
from memtune.program.step import DONATES, Recording, Step
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.training_step import prepare_model, train_step
from memtune.workload.workload import Workload

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return grad + grad * x  # a sum of its own, not autograd's

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(64))
        self.layer = nn.Linear(64, 64)
        self.register_buffer("index", torch.arange(128)[:, None].expand(128, 64) % 2)

    def forward(self, x):
        x = x * self.scale
        return {forward}

def model(): return Model()
def batch(size): return torch.randn({shape})
def loss(model, batch): return model(batch).square().sum()
def optimizer(params): return torch.optim.SGD(params, lr=1e-3)
"""
TWICE = "(x @ self.first).tanh() + (x @ self.second).sin()"
CASES = {  # forward, shape of the batch, what is made in the memory of a first operand
    "own tensors": (TWICE, "64 * size, 64", {"aten.add.Tensor"}),
    "views": (TWICE, "64 * size, 3, 64", set()),
    "both from one node": ("x * x", "64 * size, 64", {"aten.add.Tensor"}),
    "the same twice": ("x + x", "64 * size, 64", set()),
    "needed elsewhere": ("x + x.tanh() + Swish.apply(x).sin()", "64 * size, 64", {"aten.add.Tensor"}),
    "of a user's function": ("Swish.apply(x)", "64 * size, 64", set()),
    "a parameter used twice": ("(x @ self.first).tanh() @ self.first", "64 * size, 64", {"aten.add.Tensor"}),
    "scattered": ("x.gather(0, self.index)", "64 * size, 64", {"aten.scatter_add.default"}),
    "the largest": ("x.max(1).values", "64 * size, 64", {"aten.scatter.src"}),
    "a bias": (
        "self.layer((x @ self.first).transpose(1, 2)).tanh().sin()",
        "size, 64, 64",
        {"aten.add.Tensor"},
    ),
    "a bias, by hand": (
        "((x @ self.first).transpose(1, 2) @ self.second + self.scale).tanh().sin()",
        "size, 64, 64",
        set(),
    ),
    "complex products": (
        "torch.view_as_real(torch.polar(x, x) @ torch.polar(x, x)[:64].T).sin()",
        "64 * size, 64",
        {"aten.add.Tensor"},
    ),
    "indexed": ("x[self.index[:, 0]]", "64 * size, 64", {"aten.index_put.default"}),
}

TABLE = WorkspaceTable()


@pytest.fixture(autouse=True)
def _native(one_thread: None) -> None:
    if cpu_allocator.available() is not None:
        pytest.skip(f"no native ledger here: {cpu_allocator.available()}")


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("forward", "shape", "wanted"), CASES.values(), ids=CASES)
def test_is_in_place_matches_ops_of_a_real_run(
    forward: str, shape: str, wanted: set[str], tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(MODEL.replace("{forward}", forward).replace("{shape}", shape))
    workload = Workload.load(tmp_path / "model.py")
    step = recorded(workload).at(2)
    assert handed_over(step) == wanted
    assert step.peak_bytes() == native_peak_bytes(workload)
    if wanted:
        assert step.without_donations().peak_bytes() >= step.peak_bytes()


def recorded(workload: Workload) -> Recording:
    """With kernels' scratch, measured in this process."""
    TABLE.fill(key for hints in record(workload).hints.values() for key in hints.signatures if key)
    return record(workload, workspace=TABLE)


def handed_over(step: Step) -> set[str]:
    return {step.names[i] for i in np.unique(step.ops.name[step.uses.op[step.uses.mode == DONATES]])}


def native_peak_bytes(workload: Workload) -> int:
    cpu_allocator.install()
    gc.collect()
    base = cpu_allocator.live_bytes()
    torch.manual_seed(SEED)
    model = prepare_model(workload.build_model()).train()
    optimizer = workload.make_optimizer(model)
    for _ in range(2):
        with tier(HOST):
            batch = workload.make_batch(2)
        cpu_allocator.reset_peak()
        train_step(model, optimizer, workload.loss, [batch], torch.device("cpu"))
    return cpu_allocator.peak_bytes() - base


def test_recording_answers_scalar_reads_of_optimizer(tmp_path: Path) -> None:
    text = MODEL.replace("{forward}", TWICE).replace("{shape}", "64 * size, 64").replace("SGD", "Adafactor")
    (tmp_path / "model.py").write_text(text)
    workload = Workload.load(tmp_path / "model.py")
    recording = recorded(workload)
    assert recording.rung == "fake"
    assert any("reads from tensors" in note for note in recording.notes)
    assert recording.at(2).peak_bytes() == native_peak_bytes(workload)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"])
def test_reduced_loss_holds_memory_of_all_elements(loss: str, tmp_path: Path) -> None:
    text = MODEL.replace("{forward}", "x @ self.first").replace("{shape}", "64 * size, 64")
    text = text.replace(
        "model(batch).square().sum()", f"F.{loss}(model(batch).sigmoid(), torch.ones_like(batch))"
    )
    (tmp_path / "model.py").write_text(text)
    workload = Workload.load(tmp_path / "model.py")
    assert recorded(workload).at(2).peak_bytes() == native_peak_bytes(workload)
