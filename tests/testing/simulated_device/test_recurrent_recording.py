"""Recurrent layers are recorded with the fused cells that an accelerator runs, which the CPU lacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memtune.testing import on_device
from memtune.testing.drift_check import drift, recording_of

pytestmark = pytest.mark.device

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.{layer}, nn.Linear({width}, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0])

def model(): return Net()
def batch(size): return torch.randn(size, 5, 8)
def loss(model, batch): return model(batch).square().mean()
"""


@pytest.mark.parametrize(
    ("layer", "width", "cell"),
    [
        ("LSTM(8, 6, 2, dropout=0.2, batch_first=True)", 6, "lstm"),
        ("LSTM(8, 6, proj_size=3, bidirectional=True)", 6, "lstm"),
        ("GRU(8, 6, bias=False, bidirectional=True)", 12, "gru"),
        ("GRU(8, 6, 2, batch_first=True)", 6, "gru"),
    ],
)
def test_recorded_step_is_that_of_the_device(layer: str, width: int, cell: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(layer=layer, width=width))
    assert f"aten._thnn_fused_{cell}_cell.default" in recording_of(path, "sim").step.names
    assert not any("fused" in name and cell in name for name in recording_of(path).step.names)
    with on_device(torch.device("sim", 0)):
        assert not (found := drift(path)), found
