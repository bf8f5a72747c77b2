"""Pieces with two slots: what a manifest says of them is what the optimizer has, after another state was
loaded, too.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import memtune
from memtune.ssd import ssd_tensors

BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


def started(kind: str = "zero_infinity") -> memtune.Tuned:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    settings = {"offload": {"states": {"kind": kind, "resume": "last_step"}}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return memtune.apply(model, optimizer, {"settings": settings}, loss=lambda m, x: m(x).pow(2).mean())


def test_counters_are_those_of_a_state_that_was_loaded(ssd: Path) -> None:
    """Loading gives the optimizer other counters; with those of before, a run would go on with other
    corrections.
    """
    tuned = started()
    for batch in BATCHES[:2]:
        tuned.step([batch])
    tuned.load_state_dict(copy.deepcopy(tuned.state_dict()))
    tuned.step([BATCHES[2]])
    shutil.copytree(ssd_tensors.folder().path, ssd / "memtune-run-1-killed")
    tuned.step([BATCHES[3]])
    wanted = copy.deepcopy(tuned.state_dict()["model"])
    del tuned
    ssd_tensors.folder().kept.clear()
    with pytest.warns(UserWarning, match="goes on after step 3"):
        again = started()
    assert again.resumed_steps == 3
    again.step([BATCHES[3]])
    assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict()["model"].items())
    again.finish()


@pytest.mark.parametrize("kind", ["zero_infinity", "lohan"])
def test_that_it_goes_on_is_said_of_the_line_that_applied_it(ssd: Path, kind: str) -> None:
    tuned = started(kind)
    tuned.step([BATCHES[0]])
    shutil.copytree(ssd_tensors.folder().path, ssd / "memtune-run-1-killed")
    del tuned
    ssd_tensors.folder().kept.clear()
    with pytest.warns(UserWarning, match="goes on after step 1") as caught:
        again = started(kind)
    assert [each.filename for each in caught] == [__file__]
    again.finish()
