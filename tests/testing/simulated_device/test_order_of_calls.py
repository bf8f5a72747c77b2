"""Blocks called in another order than a step's: no kernel reads a weight that is still being copied."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.zoo_paths import ZOO
from torch import nn
from torch.optim import Optimizer

from memtune.api import apply
from memtune.errors import WorkloadError
from memtune.search_spaces.offload.states import angel_ptm, elixir, l2l, lohan, patrickstar, stronghold
from memtune.ssd import offload_dir
from memtune.technique import Technique
from memtune.testing.training import build, config_of
from memtune.workload import Workload, to_device

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("one_thread")]
HERE = torch.device(torch._C._get_privateuse1_backend_name(), 1)
OFFLOADS = (
    angel_ptm.AngelPtm(),
    elixir.Elixir(),
    l2l.L2L(),
    lohan.Lohan(),
    patrickstar.PatrickStar(),
    stronghold.Stronghold(),
)


@pytest.mark.parametrize("technique", OFFLOADS, ids=lambda each: each.kind)
def test_evaluation_after_an_interrupted_forward_waits_for_prefetched_weights(
    technique: Technique, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    assert evaluated(technique, interrupt=True) == evaluated(None, interrupt=False)


@pytest.mark.parametrize("technique", OFFLOADS, ids=lambda each: each.kind)
def test_second_backward_through_one_forward_adds_its_gradients(
    technique: Technique, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    assert trained_twice(technique) == trained_twice(None)


def begun(technique: Technique | None) -> tuple[Workload, nn.Module, Optimizer, Any]:
    """Return a workload, its model under `technique`, its optimizer and a batch on the device."""
    path = ZOO["gpt"]
    workload, model, optimizer = build(path, HERE)
    if technique is not None:
        apply(model, optimizer, config_of(path, technique, device="sim"), strict=False)
    torch.manual_seed(0)
    return workload, model, optimizer, to_device(workload.make_batch(2), HERE)


def trained_twice(technique: Technique | None) -> float:
    """Return the loss after a step from two backwards through one forward."""
    workload, model, optimizer, batch = begun(technique)
    loss = workload.loss(model, batch)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        return float(workload.loss(model, batch))


def evaluated(technique: Technique | None, interrupt: bool) -> float:
    """Return the loss without autograd, after a forward that `interrupt` ends in each block in turn."""
    workload, model, _, batch = begun(technique)
    blocks = [model.get_submodule(name) for name in workload.find_blocks(model)]
    for block in blocks if interrupt else ():

        def interrupted(*_: object) -> None:
            raise ValueError

        hook = block.register_forward_hook(interrupted)
        with suppress(WorkloadError):
            workload.loss(model, batch)
        hook.remove()
        with torch.no_grad():
            workload.loss(model, batch)
    torch.manual_seed(1)  # of dropout
    with torch.no_grad():
        return float(workload.loss(model, batch))
