"""Attention inside torch's own layers becomes the fused kernel; attention from parts is noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtune.autotune.record.recorder import record
from memtune.autotune.translate.translation import translate
from memtune.hardware.spec import find
from memtune.program.step import Recording
from memtune.workload.workload import Workload

ENCODER = """
import torch
from torch import nn
def model():
    layers = (nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True) for _ in range(2))
    return nn.Sequential(*layers)
def batch(size): return torch.randn(size, 32, 64)
def loss(model, batch): return model(batch).square().mean()
"""
PARTS = """
import torch
from torch import nn
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
    def forward(self, x):
        q, k, v = (each.view(x.shape[0], -1, 4, 8).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        weights = nn.functional.dropout((q @ k.mT / 3).softmax(-1), 0.1)
        return x + (weights @ v).transpose(1, 2).reshape(x.shape)
def model(): return nn.Sequential(*(Attention() for _ in range(3)))
def batch(size): return torch.randn(size, 16, 32)
def loss(model, batch): return model(batch).square().mean()
"""


def on_a100(folder: Path, text: str) -> Recording:
    path = folder / "model.py"
    path.write_text(text)
    return translate(record(Workload.load(path), target="cuda"), find("a100-80g"))


def test_attention_inside_encoder_layers_is_one_kernel_that_keeps_no_scores(tmp_path: Path) -> None:
    found = on_a100(tmp_path, ENCODER)
    assert any("efficient attention × 2" in note for note in found.notes)
    step = found.at(2)
    assert not any(step.names[name].startswith(("aten.bmm.", "aten._softmax.")) for name in step.ops.name)


@pytest.mark.parametrize(("text", "count"), [(PARTS, 3), (ENCODER, 0)])
def test_attention_from_parts_is_noted(tmp_path: Path, text: str, count: int) -> None:
    notes = [note for note in on_a100(tmp_path, text).notes if "computed from its parts" in note]
    assert notes == [] if not count else f"{count} times" in notes[0]
