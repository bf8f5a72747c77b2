"""Which ops make the ones after them depend on data."""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo_paths import ZOO

from memtune.passes.by_data import depends_on_data
from memtune.passes.region import Region, region_of
from memtune.testing.drift import recording_of


@pytest.mark.parametrize(("name", "op"), [("hf_llama", ""), ("lstm", ""), ("gpt", ""), ("moe", "aten.nonzero.default")])
def test_a_mask_made_from_positions_is_no_data(name: str, op: str) -> None:
    step = recording_of(ZOO[name]).at(2)
    region = region_of(step)
    assert isinstance(region, Region)
    assert ("aten.all.default" in region.graph.names) == (name == "hf_llama")
    assert depends_on_data(step, region) == op


LOOKS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum={momentum})

    def forward(self, x):
        scale = float(torch.ones(2).sum())
        return x + self.norm(self.up(x)) / scale

def model():
    return nn.Sequential(Block(), Block(), nn.Linear(8, 1))

def batch(size):
    return torch.randn(size, 8)

def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.mark.parametrize(("momentum", "op"), [("0.1", ""), ("None", "aten._local_scalar_dense.default")])
def test_a_number_that_code_asks_for_is_data_unless_it_follows_from_constants(momentum: str, op: str, tmp_path: Path) -> None:
    """BatchNorm without a momentum averages over all steps so far: it asks its counter for their number."""
    path = tmp_path / "looks.py"
    path.write_text(LOOKS.format(momentum=momentum))
    step = recording_of(path).at(2)
    region = region_of(step)
    assert isinstance(region, Region)
    assert depends_on_data(step, region) == op
