"""Techniques train on the simulated accelerator as on the CPU, bit for bit and without races."""

from __future__ import annotations

import pytest
import torch
from support.zoo_paths import ZOO

from memtune.search_spaces.offload.activations import copy_out, pipelined
from memtune.search_spaces.offload.states import (
    angel_ptm,
    elixir,
    l2l,
    optimizer_cpu,
    patrickstar,
    stronghold,
    zero_offload,
)
from memtune.search_spaces.recompute import full, selective
from memtune.technique import Technique
from memtune.testing.training import differences, train

pytestmark = pytest.mark.device

TECHNIQUES: dict[str, tuple[Technique, ...]] = {
    "plain": (),
    "full": (full.Full(),),
    "selective": (selective.Selective(),),
    "copy_out": (copy_out.CopyOut(min_bytes=0),),
    "selective and copy_out": (selective.Selective(), copy_out.CopyOut(ratio=0.5, min_bytes=0)),
    "pipelined": (pipelined.Pipelined(),),
    "optimizer_cpu": (optimizer_cpu.OptimizerCpu(),),
    "zero_offload": (zero_offload.ZeroOffload(),),
    "l2l": (l2l.L2L(),),
    "patrickstar": (patrickstar.PatrickStar(),),
    "angel_ptm": (angel_ptm.AngelPtm(),),
    "stronghold": (stronghold.Stronghold(),),
    "elixir": (elixir.Elixir(),),
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_technique_trains_as_on_the_cpu(name: str) -> None:
    there = train(ZOO["gpt"], *TECHNIQUES[name], device=torch.device("sim", 0))
    assert differences(there, train(ZOO["gpt"], *TECHNIQUES[name])) == []
