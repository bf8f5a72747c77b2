"""A disk that is full, broken or writes in parts: each writer of the project raises a MemtuneError or has
written, and readers find the old state or the new one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MOST = int(os.environ.get("MEMTUNE_CHAOS", "1")) * 4
"""Calls of each writer that fail, one at a time; MEMTUNE_CHAOS is the scale of `make test-chaos`."""


def test_writers_survive_each_failing_call(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    shim = tmp_path / "storage_faults.so"
    source = HERE / "storage_faults.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", shim, source, "-ldl"], check=True)
    (files := tmp_path / "files").mkdir()
    done = subprocess.run(
        [sys.executable, str(HERE / "storage_writers.py"), str(shim), str(files), str(MOST)],
        env={**os.environ, "LD_PRELOAD": str(shim)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) >= 8
    for each in found:
        assert each["wrong"] == [], each["writer"]
        assert each["faults"] >= 3, each["writer"]  # each kind of fault has reached it
    print(f"{sum(each['faults'] for each in found)} faults of storage: 0 foreign exceptions, 0 torn files")
