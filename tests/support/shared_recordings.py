"""Recordings of the tests' models and what else takes long to make, each made once in a test run: workers,
ranks and other processes share them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from memtune.program import Recording
from memtune.testing import drift_check
from memtune.workload import Workload

T = TypeVar("T")
ZOO = Path(__file__).parents[1] / "zoo"
_record = drift_check.record


def install() -> None:
    """Let `memtune.testing.drift_check.recording_of` read recordings that another process has made."""
    drift_check.record = _shared


def _shared(workload: Workload, **how: Any) -> Recording:
    if how or ZOO not in workload.path.parents:
        return _record(workload, **how)
    return made_once(workload.path.stem, lambda: _record(workload))


def made_once(name: str, make: Callable[[], T]) -> T:
    """Return what `make` returns in the first process of this test run that calls this with `name`."""
    folder = Path(os.environ["HOME"], "recordings")  # of this test run: tests/conftest.py
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.pickle"
    with FileLock(f"{file}.lock"):  # else all ranks of a test would make the same one
        if not file.exists():
            made, part = make(), file.with_suffix(".part")
            part.write_bytes(pickle.dumps(made))
            part.replace(file)  # a test may kill this process at any moment
            return made
    found: T = pickle.loads(file.read_bytes())
    return found
