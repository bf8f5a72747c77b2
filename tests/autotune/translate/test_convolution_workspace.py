"""Estimated workspaces of convolutions: copies of operands with channels last, where cuDNN makes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memtune.autotune.record.recorder import record
from memtune.autotune.translate.translation import translate
from memtune.hardware.spec import find
from memtune.program.step import Kind
from memtune.workload.workload import Workload

MODEL = """
import torch
from torch import nn
torch.backends.cudnn.allow_tf32 = {tf32}

def model():
    made = nn.Conv2d(6, 12, 3, stride=2, padding=1, groups={groups})
    return nn.Sequential(made, nn.ReLU()).to({dtype})
def batch(size): return torch.randn(size, 6, 9, 9).to({dtype}){layout}
def loss(model, batch): return model(batch).float().square().mean()
def optimizer(params): return torch.optim.SGD(params, lr=1e-3)
"""
PLAIN = {"tf32": True, "groups": 1, "dtype": "torch.float32", "layout": ""}
IMAGES, WEIGHT = 2 * (8 * 81 + 12 * 25), 12 * 6 * 9
"""Elements of 2 images and their outputs, channels padded to 4 of float32; of the weight."""
WIDE = 2 * (8 * 81 + 16 * 25)
"""The same, channels padded to 8 of bfloat16."""


@pytest.fixture(autouse=True)
def _settings_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


def scratch(folder: Path, gpu: str, **changes: object) -> list[int]:
    path = folder / "model.py"
    path.write_text(MODEL.format(**{**PLAIN, **changes}))
    step = translate(record(Workload.load(path), target="cuda"), find(gpu)).at(2)
    made = (step.storages.kind == Kind.WORKSPACE) & (step.storages.producer >= 0)
    names = [step.names[step.ops.name[op]] for op in step.storages.producer[made]]
    assert all("convolution" in name for name in names)
    return [int(n_bytes) for n_bytes in step.storages.bytes[made]]


@pytest.mark.parametrize(
    ("gpu", "changes", "n_bytes"),
    [
        ("a100", {}, 4 * (IMAGES + WEIGHT)),
        ("a100", {"dtype": "torch.bfloat16"}, 2 * (WIDE + WEIGHT)),
        ("a100", {"groups": 2}, 4 * (IMAGES + WEIGHT // 2)),
        ("a100", {"groups": 6}, 0),
        ("a100", {"tf32": False}, 0),
        ("a100", {"layout": ".to(memory_format=torch.channels_last)"}, 0),
        ("v100", {}, 0),
        ("mi300x", {}, 0),
    ],
)
def test_convolution_copies_operands_where_its_kernel_needs_channels_last(
    tmp_path: Path, gpu: str, changes: dict[str, object], n_bytes: int
) -> None:
    assert scratch(tmp_path, gpu, **changes) == ([n_bytes, n_bytes] if n_bytes else [])
