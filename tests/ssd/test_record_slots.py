"""Pieces with two slots: a manifest's facts equal the optimizer's state, also after another state was
loaded.
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


def test_counters_follow_a_loaded_state(ssd: Path) -> None:
    """A loaded state has other counters; with the old ones a resumed run would apply other bias
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
    with pytest.warns(UserWarning, match="resumes after step 3"):
        again = started()
    assert again.resumed_steps == 3
    again.step([BATCHES[3]])
    assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict()["model"].items())
    again.finish()


@pytest.mark.parametrize("kind", ["zero_infinity", "lohan"])
def test_resume_warning_names_the_line_of_apply(ssd: Path, kind: str) -> None:
    tuned = started(kind)
    tuned.step([BATCHES[0]])
    shutil.copytree(ssd_tensors.folder().path, ssd / "memtune-run-1-killed")
    del tuned
    ssd_tensors.folder().kept.clear()
    with pytest.warns(UserWarning, match="resumes after step 1") as caught:
        again = started(kind)
    assert [each.filename for each in caught] == [__file__]
    again.finish()
