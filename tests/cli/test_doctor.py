"""`memtune doctor` names the accelerator: type, devices and what it lacks."""

from __future__ import annotations

import json

import pytest

from memtune import cli
from memtune.device import Capability, Platform, accelerator


@pytest.fixture
def present(monkeypatch: pytest.MonkeyPatch) -> Platform:
    """Two devices of a type that torch's package has added."""
    found = Platform("npux", "npux", "NPU X", frozenset(Capability) - {Capability.TRITON}, gaps=("no LSTM",))
    monkeypatch.setitem(accelerator._platforms, "npux", found)
    monkeypatch.setattr(accelerator, "device_type", lambda: "npux")
    monkeypatch.setattr(accelerator, "count", lambda kind=None: 2)
    monkeypatch.setattr(accelerator, "name", lambda device=0: "X 64 GB")
    return found


def test_doctor_names_the_accelerator(present: Platform, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (each for each in lines if each.startswith("accelerator: "))
    assert "2 × X 64 GB" in line
    assert "--device npux: NPU X" in line
    assert "  lacks kernels in Triton" in lines
    assert any("no LSTM" in each for each in lines)


def test_doctor_json_has_the_accelerator(present: Platform, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["gpus"] == ["X 64 GB", "X 64 GB"]
    assert (facts["accelerator"]["type"], facts["accelerator"]["title"]) == ("npux", "NPU X")
    assert facts["accelerator"]["lacks"] == [Capability.TRITON]
    assert facts["accelerator"]["gaps"] == ["no LSTM"]


def test_doctor_without_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accelerator, "device_type", lambda: None)
    assert cli.run(["doctor"]) == 0
    assert "accelerator: none that torch sees" in capsys.readouterr().out
