"""Fixtures of tests that measure this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memtune.hardware import cpu_probe


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory without rates, so that they are measured."""
    monkeypatch.setenv("MEMTUNE_CACHE", str(tmp_path))
    cpu_probe.cpu.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    cpu_probe.cpu.cache_clear()
