"""Ops that make later ones depend on data are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.zoo_paths import ZOO

from memtune.activations.schedules.region_pass import Region, depends_on_data, not_foreseen, region_of
from memtune.search_spaces.recompute.checkmate import Checkmate
from memtune.search_spaces.recompute.dtr import Dtr
from memtune.technique import Technique
from memtune.testing.drift_check import plain_program, recording_of, target_of


@pytest.mark.parametrize(
    ("name", "op"), [("hf_llama", ""), ("lstm", ""), ("gpt", ""), ("moe", "aten.nonzero.default")]
)
def test_mask_made_from_positions_is_no_data(name: str, op: str) -> None:
    step = recording_of(ZOO[name]).at(2)
    region = region_of(step)
    assert isinstance(region, Region)
    assert ("aten.all.default" in region.graph.names) == (name == "hf_llama")
    assert depends_on_data(step, region) == op


WORKLOAD = """
def model():
    return nn.Sequential(Block(), Block(), nn.Linear(8, 1))

def batch(size):
    return torch.randn(size, 8)

def loss(model, batch):
    return model(batch).square().mean()
"""
"""Of a `Block`."""


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
"""


@pytest.mark.parametrize(("momentum", "op"), [("0.1", ""), ("None", "aten._local_scalar_dense.default")])
def test_item_is_data_unless_it_follows_from_constants(momentum: str, op: str, tmp_path: Path) -> None:
    """BatchNorm without a momentum averages over all steps: it reads their number from its counter."""
    path = tmp_path / "looks.py"
    path.write_text(LOOKS.format(momentum=momentum) + WORKLOAD)
    step = recording_of(path).at(2)
    region = region_of(step)
    assert isinstance(region, Region)
    assert depends_on_data(step, region) == op


DRAWS = """
import torch
from torch import nn

MINE = torch.Generator()

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        y = self.up(x).tanh()
        return x + self.down(y * torch.empty_like(y).bernoulli_(0.9{given}))

def model():
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(8, 1))

def batch(size):
    return torch.randn(size, 8)

def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.mark.parametrize("given", ["", ", generator=MINE"])
def test_schedule_refuses_the_models_own_generator(given: str, tmp_path: Path) -> None:
    path = tmp_path / "draws.py"
    path.write_text(DRAWS.format(given=given))
    step, program = recording_of(path).at(8), plain_program(path, 8)
    region = region_of(step)
    assert isinstance(region, Region)
    assert depends_on_data(step, region) == ""
    assert (
        "aten.bernoulli_.float in the model draws from a generator of its own" in not_foreseen(step, region)
    ) == bool(given)
    before: tuple[Technique, ...] = (Dtr(ratio=0.5, online=False), Checkmate(share=0.5))
    assert ["a generator of its own" in str(each.fits(program, target_of(each))) for each in before] == [
        bool(given)
    ] * 2
    decided = Dtr(ratio=0.9)
    assert decided.fits(program, target_of(decided)) is None
    assert ("online" in decided.plan(program, target_of(decided)).document()) == bool(given)


ROTARY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        turned = torch.view_as_complex(self.up(x).view(-1, 4, 2)) * torch.polar(torch.ones(4), torch.arange(4.0))
        return x + torch.view_as_real(turned).flatten(1)
"""  # noqa: E501


def test_schedule_refuses_lazily_conjugated_values(tmp_path: Path) -> None:
    """Backward of complex products reads lazily conjugated values.

    `checkmate` refuses before anything runs, `dtr` decides while the model runs.
    """
    path = tmp_path / "turns.py"
    path.write_text(ROTARY + WORKLOAD)
    step, program = recording_of(path).at(8), plain_program(path, 8)
    region = region_of(step)
    assert isinstance(region, Region)
    assert "complex numbers" in not_foreseen(step, region)
    refused = Checkmate(kind="checkmate").fits(program, target_of(Checkmate(kind="checkmate")))
    assert refused is not None
    assert "complex numbers" in refused.text
    assert not recording_of(ZOO["gpt"]).at(2).lazy_values
