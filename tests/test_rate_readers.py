from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from fixed_cpu import CPU, RATES
from support import rate_readers
from support.gloo import run_ranks
from support.search import prepared_search

from memtune import hardware
from memtune.hardware.spec import of_cpu

READING: dict[str, Callable[[], object]] = {
    "a rate": lambda: CPU.launch_s,
    "hardware as a key": lambda: hash(CPU),
    "a measured rate": lambda: RATES.op_s,
    "a rank": lambda: run_ranks(launch_s, 0),
    "another process": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
}
NOT_READING: dict[str, Callable[[], object]] = {
    "other constants": lambda: (CPU.memory_bytes, CPU.cores),
    "a copy": lambda: replace(CPU, cores=1),
    "hardware made": lambda: of_cpu(RATES),
    "a GPU": lambda: hardware.find("h100-80g").launch_s,
    "a rank": lambda: run_ranks(no_rate, 0),
}


def launch_s() -> float:
    return CPU.launch_s


def no_rate() -> int:
    return CPU.memory_bytes


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> rate_readers.ReaderNotes:
    found = rate_readers.ReaderNotes(current="file.py")
    monkeypatch.setattr(rate_readers, "NOTES", found)
    return found


@pytest.mark.parametrize("read", READING.values(), ids=READING)
def test_rate_readers_note_the_file(found: rate_readers.ReaderNotes, read: Callable[[], object]) -> None:
    read()
    assert "file.py" in found.readers


@pytest.mark.parametrize("run", NOT_READING.values(), ids=NOT_READING)
def test_rate_readers_note_nothing_else(found: rate_readers.ReaderNotes, run: Callable[[], object]) -> None:
    run()
    assert not found.readers


def test_rate_readers_note_helpers_that_may_cache(found: rate_readers.ReaderNotes) -> None:
    exec(compile("CPU.launch_s", prepared_search.__file__, "eval"), {"CPU": CPU})
    assert "support/search/prepared_search.py" in found.readers


def test_rate_readers_follow_imports_of_helpers() -> None:
    helpers = rate_readers.helpers_of("test_rate_readers.py")
    assert {"support/search/prepared_search.py", "support/zoo_paths.py"} <= helpers  # through the first
