"""Capabilities that a device lacks are reasons, in a search and in `apply`."""

from __future__ import annotations

import pytest

from memtune.device import PLATFORMS, Capability, Platform
from memtune.search_spaces import find
from memtune.search_spaces._support import refusal
from memtune.technique import Facts, Technique, lacking

ALLOCATORS = {
    "expandable_segments": Capability.EXPANDABLE_SEGMENTS,
    "async": Capability.STREAM_ORDERED,
    "gmlake": Capability.OWN_ALLOCATOR,
}


def allocator(kind: str) -> Technique:
    return find("allocator", kind)(kind=kind)


def refused(platform: Platform | None, technique: Technique) -> str | None:
    found = refusal(Facts({technique.slot: technique}, 1, False, "inductor", 4, platform))
    return None if found is None else found[1].text


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_device_without_the_capability_is_refused(kind: str) -> None:
    technique, needed = allocator(kind), ALLOCATORS[kind]
    assert refused(Platform("x", "x", "X devices"), technique) == f"missing on X devices: {needed}"
    assert refused(Platform("x", "x", "X devices", frozenset({needed})), technique) is None
    assert refused(PLATFORMS["cuda"], technique) is None


@pytest.mark.parametrize("kind", ALLOCATORS)
def test_cpu_is_never_asked(kind: str) -> None:
    """A config for a GPU may be applied on CPU: its allocator has no effect there, or is a shim."""
    assert refused(PLATFORMS["cpu"], allocator(kind)) is None


def test_native_needs_settings_only_with_a_knob() -> None:
    plain = allocator("native")
    assert not plain.needs
    assert plain.model_copy(update={"max_split_size_mb": 64}).needs == (Capability.ALLOCATOR_SETTINGS,)


def test_reason_names_the_first_capability_and_a_command() -> None:
    reason = lacking(PLATFORMS["xpu"], (Capability.STREAMS, Capability.OWN_ALLOCATOR))
    assert reason is not None
    assert Capability.OWN_ALLOCATOR.value in reason.text
    assert "memtune doctor" in reason.fix
