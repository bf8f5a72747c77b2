"""Complete steps with experts on SSD: used and missed experts, and resident parameters."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.models.routed_experts import STATES, routed
from torch import nn

import memtune
from memtune.errors import ApplyError, EnvironmentFault
from memtune.offload.experts import resume_experts
from memtune.offload.experts.expert_offload import ExpertOptimizer
from memtune.offload.experts.resume_experts import ResidentSlots
from memtune.ssd import ssd_tensors
from memtune.ssd.last_step import Manifest
from memtune.ssd.ssd_file import TENSORS

BATCHES = [torch.randn(2, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
KEEPS = STATES | {"resume": "last_step"}


@pytest.fixture(autouse=True)
def _remove_folder(ssd: Path) -> Iterator[None]:
    yield
    ssd_tensors.folder().remove()


def tuned_of(
    model: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any
) -> memtune.Tuned:
    optimizer = kind(model.parameters(), **({"lr": 0.05} | settings))  # type: ignore[call-arg]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the resume
        return memtune.apply(
            model,
            optimizer,
            {"settings": {"offload": {"states": KEEPS}}},
            loss=lambda m, x: m(x).pow(2).mean(),
            strict=False,
        )


def optimizer_of(tuned: memtune.Tuned) -> ExpertOptimizer:
    held: ExpertOptimizer = tuned._context.checks["offload.states"].__self__._expert_optimizer  # type: ignore[attr-defined]
    return held


def crashed_after(directory: Path, steps: int, **options: Any) -> tuple[dict[str, Any], int]:
    """Leave the folder of a run that was killed after `steps` steps; return the state after all steps, and
    the number of missed updates at the crash.
    """
    tuned = tuned_of(routed(), **options)
    for batch in BATCHES[:steps]:
        tuned.step([batch])
    missed = sum(map(len, optimizer_of(tuned)._missed.values()))
    shutil.copytree(ssd_tensors.folder().path, directory / "memtune-run-1-killed")
    for batch in BATCHES[steps:]:
        tuned.step([batch])
    found = copy.deepcopy(tuned.state_dict())
    del tuned
    ssd_tensors.folder().kept.clear()
    return found, missed


def resumed(**options: Any) -> tuple[dict[str, Any], int]:
    tuned = tuned_of(routed(), **options)
    for batch in BATCHES[tuned.resumed_steps :]:
        tuned.step([batch])
    return copy.deepcopy(tuned.state_dict()), tuned.resumed_steps


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


SGD = {"kind": torch.optim.SGD, "momentum": 0.9, "dampening": 0.5}


@pytest.mark.parametrize("options", [{}, SGD, {"kind": torch.optim.Adagrad}], ids=["adamw", "sgd", "adagrad"])
def test_resume_applies_missed_updates_to_the_bit(ssd: Path, options: dict[str, Any]) -> None:
    """Missed updates are in the manifest, and optimizer state that was never made is absent from it."""
    wanted, missed = crashed_after(ssd, 3, **options)
    assert missed > 0
    found, steps = resumed(**options)
    assert steps == 3
    assert same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["missed", "weights"])
def test_resume_differs_without_missed_updates_or_weights(ssd: Path, broken: str) -> None:
    wanted, _ = crashed_after(ssd, 3)
    wrong = {
        "missed": patch.object(resume_experts, "_run_length_decode", lambda *_: {}),
        "weights": patch.object(ResidentSlots, "resume_from", lambda *_: None),
    }[broken]
    with wrong:
        assert not same(resumed()[0]["model"], wanted["model"])


def test_missed_updates_are_encoded_as_runs() -> None:
    """Each setting is written once; steps in which a parameter had no gradient are not in its runs."""
    steps = [
        {"lr": 0.1 / (1 + at), "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0, "params": object()}
        for at in range(9)
    ]
    pieces: list[Any] = [SimpleNamespace(device=nn.Parameter(torch.zeros(1))) for _ in range(4)]
    missed = {
        pieces[0].device: steps[4:],
        pieces[1].device: steps,
        pieces[3].device: [*steps[1:3], *steps[7:]],
    }
    notes = json.loads(json.dumps(resume_experts._run_length_encode(pieces, missed)))
    assert notes["missed"] == {"1": [[0, 9]], "0": [[4, 5]], "3": [[1, 2], [7, 2]]}
    assert len(notes["settings"]) == 9
    found = resume_experts._run_length_decode(pieces, notes)
    assert found.keys() == missed.keys()
    for parameter, mine in missed.items():
        assert [each["lr"] for each in found[parameter]] == [each["lr"] for each in mine]
        assert all(tuple(each["betas"]) == (0.9, 0.95) and "params" not in each for each in found[parameter])


def test_step_keeps_state_loaded_by_the_optimizer(ssd: Path) -> None:
    """Also the state of experts that the next step does not use."""
    tuned = tuned_of(routed())
    for batch in BATCHES[:2]:
        tuned.step([batch])
    state = copy.deepcopy(tuned.optimizer.state_dict())
    for each in state["state"].values():
        each["exp_avg"] = each["exp_avg"] + 1
    tuned.optimizer.load_state_dict(state)
    tuned.step([BATCHES[2]])
    wanted = copy.deepcopy(tuned.state_dict())
    shutil.copytree(ssd_tensors.folder().path, ssd / "memtune-run-1-killed")
    del tuned
    ssd_tensors.folder().kept.clear()
    again = tuned_of(routed())
    assert again.resumed_steps == 3
    assert same(copy.deepcopy(again.state_dict()), wanted)


def test_damaged_resident_slot_raises_and_restores_the_model(ssd: Path) -> None:
    crashed_after(ssd, 3)
    folder = ssd / "memtune-run-1-killed"
    manifest = max(filter(None, map(Manifest.read, folder.glob("manifest-*"))), key=lambda each: each.step)
    at = manifest.pieces[-1].offset
    with open(folder / TENSORS, "r+b") as file:
        file.seek(at)
        (right,) = file.read(1)
        file.seek(at)
        file.write(bytes([right ^ 1]))
    model = routed()
    with pytest.raises(EnvironmentFault, match=r"the optimizer state of 2\.bias") as caught:
        tuned_of(model)
    assert caught.value.code == "MT363"
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), routed().parameters(), strict=True)
    )


def test_failed_apply_after_resume_restores_the_model(ssd: Path) -> None:
    """Missed updates of the resumed step must not be applied to the restored model."""
    _, missed = crashed_after(ssd, 3)
    assert missed > 0
    model = routed()
    with (
        patch.object(ExpertOptimizer, "check", side_effect=ApplyError("no", fix="", code="MT309")),
        pytest.raises(ApplyError),
    ):
        tuned_of(model)
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), routed().parameters(), strict=True)
    )


def test_step_refuses_parameters_added_after_apply(ssd: Path) -> None:
    """They would not be kept."""
    tuned = tuned_of(routed())
    tuned.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ApplyError, match="would not be kept"):
        tuned.step([BATCHES[0]])
