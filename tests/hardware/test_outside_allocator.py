"""Device memory outside torch's allocator, as ranges."""

from __future__ import annotations

import pytest

from memtune.hardware import outside_allocator
from memtune.hardware.known_devices import names
from memtune.hardware.spec import find


def test_context_depends_on_architecture_and_on_lazy_loading() -> None:
    old, ampere, desktop = (
        outside_allocator.context("sm80", "11.2"),
        outside_allocator.context("sm80", "12.6"),
        outside_allocator.context("sm86", "12.6"),
    )
    assert old != ampere
    assert desktop.n_bytes < ampere.n_bytes
    assert outside_allocator.context("sm90", "11.2") == old


@pytest.mark.parametrize("name", names())
def test_values_are_inside_their_ranges(name: str) -> None:
    found = find(name)
    for value, (low, high) in (
        (found.context_bytes, found.context_range),
        (found.communicator_bytes, found.communicator_range),
        (found.cudnn_bytes, found.cudnn_range),
    ):
        assert 0 <= low <= value <= high
        assert value > 0
