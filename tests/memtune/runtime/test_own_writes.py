"""Weights on the device that the user writes between steps: the next update begins with them, or says why it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from upset_loops import ALL, AT_END, DOWN, Net, assert_equal, batch, build, loss, made, weights

from memtune._apply import Tuned, apply
from memtune.errors import ApplyError
from memtune.runtime import offload_dir

pytestmark = pytest.mark.usefixtures("one_thread")
ON_DEVICE = [*DOWN, *(name for name in AT_END if name != "smart_infinity")]
"""All weights are there between steps."""


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))


@torch.no_grad()
def write(model: Net, inside: bool) -> None:
    model.first.weight.mul_(0.5)
    model.last.weight.data = model.last.weight.clamp(-0.1, 0.1)
    if inside:
        model.blocks[1].up.weight.zero_()  # type: ignore[union-attr, operator]


def trained(model: Net, optimizer: torch.optim.Optimizer, tuned: Tuned | None, inside: bool) -> dict[str, torch.Tensor]:
    for index in range(4):
        if tuned is not None and index % 2:
            tuned.step([batch(index)])  # updates inside backward
        else:
            optimizer.zero_grad()
            loss(model, batch(index)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        write(model, inside)
    return weights(model)


@pytest.mark.parametrize("name", [*ALL, *(name for name in AT_END if name != "smart_infinity")])
def test_updates_begin_with_what_was_written(name: str) -> None:
    inside = name in ON_DEVICE
    assert_equal(trained(*made(name), inside), trained(*build(), None, inside))


def test_updaters_in_processes_of_their_own_refuse_the_next_step() -> None:
    model, optimizer, tuned = made("smart_infinity")
    with pytest.raises(ApplyError, match=r"MT318 2 weights were loaded(.|\n)*or written on the device"):
        trained(model, optimizer, tuned, False)


def test_weights_whose_update_is_late_are_not_to_be_written() -> None:
    model, optimizer = build()
    states: dict[str, Any] = {"kind": "zero_offload", "delayed": True, "delay_after": 1}
    tuned = apply(model, optimizer, {"settings": {"offload": {"states": states}}}, loss=loss, strict=False)
    tuned.step([batch(0)])
    write(model, True)  # its update is over
    tuned.step([batch(1)])
    write(model, True)
    with pytest.raises(ApplyError, match="MT318 3 weights were written on the device while an update of theirs is under way"):
        tuned.step([batch(2)])
