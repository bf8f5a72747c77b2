"""Memory of a context, from free memory before and after another process's ops; a real one needs a GPU."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from memtune.autotune.predict import context_memory
from memtune.errors import EnvironmentFault
from memtune.hardware.calibration_cache import Calibration
from memtune.hardware.spec import find, with_measured

ON = torch.device("meta")


class Device:
    """A device on which each stage of a process takes memory, `reserved` of it for tensors."""

    def __init__(self, taken: tuple[int, int], reserved: int = 20) -> None:
        self.free, self.taken, self.reserved = 1000, iter(taken), reserved

    @contextmanager
    def process(self, on: torch.device) -> Iterator[context_memory.Stage]:
        """Yield the stages of one process."""

        def stage() -> int:
            self.free -= next(self.taken)
            return self.reserved

        yield stage


def test_measure_leaves_out_what_the_process_reserves() -> None:
    device = Device((320, 100))
    assert context_memory.measure(ON, lambda on: device.free, device.process) == (300, 100)


def test_measure_refuses_a_device_that_others_use() -> None:
    device = Device((320, -50))
    with pytest.raises(EnvironmentFault, match="other processes"):
        context_memory.measure(ON, lambda on: device.free, device.process)


def test_lines_of_libraries_are_skipped_and_a_dead_process_is_named() -> None:
    says = io.StringIO("a library's banner\n2097152\n4194304\n")
    assert [context_memory.reserved_bytes(says) for _ in range(2)] == [2097152, 4194304]
    with pytest.raises(EnvironmentFault, match="second process"):
        context_memory.reserved_bytes(says)


def test_measured_context_replaces_the_table_and_its_range() -> None:
    known = Calibration("here", "2026-01-01", {"context_bytes": 7e8, "cudnn_bytes": 1e8})
    found = with_measured(find("a100"), known)
    assert found.context_range == (found.context_bytes,) * 2 == (700_000_000,) * 2
    assert found.cudnn_range == (100_000_000,) * 2
