"""Recordings of the tests' models, each made once in a test run: workers and ranks share them."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

from filelock import FileLock

from memtune.program import Recording
from memtune.testing import drift_check
from memtune.workload import Workload

ZOO = Path(__file__).parents[1] / "zoo"
_record = drift_check.record


def install() -> None:
    """Let `memtune.testing.drift_check.recording_of` read recordings that another process has made."""
    drift_check.record = _shared


def _shared(workload: Workload, **how: Any) -> Recording:
    if how or ZOO not in workload.path.parents:
        return _record(workload, **how)
    folder = Path(os.environ["HOME"], "recordings")  # of this test run: tests/conftest.py
    folder.mkdir(exist_ok=True)
    file = folder / f"{workload.path.stem}.pickle"
    with FileLock(f"{file}.lock"):  # else all ranks of a test would make the same one
        if not file.exists():
            made, part = _record(workload), file.with_suffix(".part")
            part.write_bytes(pickle.dumps(made))
            part.replace(file)  # a test may kill this process at any moment
            return made
    found: Recording = pickle.loads(file.read_bytes())
    return found
