"""Platforms: what each device type has, and how one that memtune does not know describes itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memtune.device import (
    PLATFORMS,
    Capability,
    accelerator,
    backend_of,
    backends_of,
    of_hardware,
    platform_of,
)
from memtune.errors import EnvironmentFault, UsageError

NAME = torch._C._get_privateuse1_backend_name()


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A backend for PrivateUse1, by its module alone."""
    module = SimpleNamespace(set_per_process_memory_fraction=lambda fraction, device: None)
    monkeypatch.setattr(torch, NAME, module, raising=False)  # in place of a backend that is loaded
    monkeypatch.setattr(accelerator, "_platforms", {})
    return module


def test_unknown_device_type_is_one_message() -> None:
    with pytest.raises(UsageError) as caught:
        platform_of("tpux")
    assert caught.value.code == "MT131"
    assert "has no device type tpux" in caught.value.what
    assert "cpu" in caught.value.evidence
    assert caught.value.fix


def test_absent_device_names_the_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "device_type", lambda: None)
    accelerator.require_present("cpu")
    with pytest.raises(EnvironmentFault, match="sees no xpu device") as caught:
        accelerator.require_present("xpu")
    assert caught.value.code == "MT104"


def test_out_of_tree_device_is_asked_by_the_usual_names(stranger: SimpleNamespace) -> None:
    found = platform_of(NAME).capabilities
    assert {Capability.STREAMS, Capability.LIMIT} <= found
    assert Capability.OWN_ALLOCATOR not in found
    del stranger.set_per_process_memory_fraction
    accelerator._platforms.clear()
    assert Capability.LIMIT not in platform_of(NAME).capabilities


def test_out_of_tree_device_describes_itself(stranger: SimpleNamespace) -> None:
    stranger.memtune_platform = {
        "title": "NPU X",
        "capabilities": ["STREAMS", "TRITON"],
        "visible_devices": "NPUX_VISIBLE_DEVICES",
    }
    found = platform_of(torch.device(NAME, 1))
    assert (found.name, found.device, found.title) == (NAME, NAME, "NPU X")
    assert found.visible_devices == "NPUX_VISIBLE_DEVICES"
    assert found.capabilities == {Capability.STREAMS, Capability.TRITON}
    assert set(found.lacks) == set(Capability) - found.capabilities


def test_amd_is_another_platform_of_the_same_device_type() -> None:
    assert of_hardware("cuda", "gfx942") == "rocm"
    assert of_hardware("cuda", "sm90") == "cuda"
    assert PLATFORMS["rocm"].device == PLATFORMS["cuda"].device
    assert Capability.OWN_ALLOCATOR in PLATFORMS["rocm"].lacks


@pytest.mark.parametrize(("kind", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "xccl")])
def test_backend_is_that_of_torch(kind: str, backend: str) -> None:
    assert backend_of(kind) == backend


def test_backends_name_host_and_device() -> None:
    assert backends_of("cpu") == "cpu:gloo"
    assert backends_of("cuda") == "cpu:gloo,cuda:nccl"
