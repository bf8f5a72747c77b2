from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from memtune.autotune.record import record
from memtune.runtime import shim
from memtune.runtime.loop import train_step
from memtune.runtime.prepare import prepare_model
from memtune.runtime.tiers import HOST, tier
from memtune.runtime.workspace import WorkspaceTable
from memtune.workload import Workload

MODEL = """
import torch
from torch import nn

class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x):
        x = x * self.scale  # its gradient is the sum of two
        return (x @ self.first).tanh() + (x @ self.second).sin()

def model(): return Twice()
def batch(size): return torch.randn(64 * size, {shape})
def loss(model, batch): return model(batch).square().sum()
def optimizer(params): return torch.optim.SGD(params, lr=1e-3)
"""


@pytest.mark.parametrize(("shape", "in_place"), [("64", True), ("3, 64", False)], ids=["own tensors", "views"])
def test_a_sum_is_made_in_place_of_what_nobody_else_holds(shape: str, in_place: bool, tmp_path: Path, one_thread: None) -> None:
    if shim.available() is not None:
        pytest.skip(f"no native ledger here: {shim.available()}")
    (tmp_path / "model.py").write_text(MODEL.replace("{shape}", shape))
    workload = Workload.load(tmp_path / "model.py")
    step = record(workload, workspace=WorkspaceTable.cached(threads=1)).at(2)
    names = np.asarray(step.names)[step.op_name[step.use_op]]
    summed = (names == "aten.add.Tensor") & (step.use_mutates == 1)
    assert summed.any() == in_place
    assert step.peak_bytes() == native_peak_bytes(workload)


def native_peak_bytes(workload: Workload) -> int:
    shim.install()
    gc.collect()
    base = shim.live_bytes()
    model = prepare_model(workload.build_model()).train()
    optimizer = workload.make_optimizer(list(model.parameters()))
    for _ in range(2):
        shim.reset_peak()
        with tier(HOST):
            batch = workload.make_batch(2)
        train_step(model, optimizer, workload.loss, [batch], torch.device("cpu"))
    return shim.peak_bytes() - base
