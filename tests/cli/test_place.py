"""`--device TYPE[:N]`, `--gpus` and `--workers`: which devices, and how many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memtune.cli import _options
from memtune.cli._options import check_predictable, place
from memtune.device import accelerator
from memtune.errors import EnvironmentFault, UsageError

STRANGER = torch._C._get_privateuse1_backend_name()
"""An out-of-tree device type that torch knows by name."""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"device": "cpu"}, ("cpu", 1)),
        ({"device": "cpu", "workers": 2}, ("cpu", 2)),
        ({"device": "cpu:3"}, ("cpu", 3)),
        ({}, ("cuda", 1)),
        ({"device": "cuda:4"}, ("cuda", 4)),
        ({"device": "xpu", "gpus": 2}, ("xpu", 2)),
        ({"device": "cuda:4", "gpus": 4}, ("cuda", 4)),
        ({"device": f"{STRANGER}:2"}, (STRANGER, 2)),
    ],
    ids=str,
)
def test_place_of_a_prediction(given: dict[str, Any], found: tuple[str, int]) -> None:
    assert place(given, for_trials=False) == found


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"device": "tpux"}, "--device tpux is unknown"),
        ({"device": "cuda:x"}, "does not give a number"),
        ({"device": "cuda:0"}, "does not give a number"),
        ({"device": "cuda:4", "gpus": 2}, "agrees with --gpus 2"),
        ({"device": "cpu:4", "workers": 2}, "agrees with --workers 2"),
        ({"device": "cpu", "gpus": 2}, "--gpus goes with GPUs"),
    ],
    ids=str,
)
def test_contradictions_are_one_message(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        place(given, for_trials=False)
    assert (caught.value.code, bool(caught.value.fix)) == ("MT100", True)


def test_prediction_without_a_gpu_names_one_before_torch_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {name: replace(each, driver_files=()) for name, each in _options.PLATFORMS.items()}
    monkeypatch.setattr(_options, "PLATFORMS", without)
    with pytest.raises(EnvironmentFault, match="No GPU is visible") as caught:
        check_predictable(None, "cuda")
    assert "--gpu-type h100-80g" in caught.value.fix
    check_predictable("a100-40g", "cuda")
    check_predictable(None, "cpu")


def test_trials_take_the_accelerator_that_is_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "device_type", lambda: STRANGER)
    monkeypatch.setattr(accelerator, "count", lambda: 3)
    assert place({"device": STRANGER}, for_trials=True) == (STRANGER, 3)
    assert place({"device": f"{STRANGER}:2"}, for_trials=True) == (STRANGER, 2)
    with pytest.raises(EnvironmentFault, match="4 GPUs requested, 3 visible"):
        place({"device": f"{STRANGER}:4"}, for_trials=True)
    with pytest.raises(EnvironmentFault, match="No GPU is visible") as caught:
        place({"device": "xpu"}, for_trials=True)
    assert caught.value.evidence.startswith("ZE_AFFINITY_MASK=")
