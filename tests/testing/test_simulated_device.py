"""Tests on the simulated accelerator, in a process of their own, where it is built (`make test-device`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.simulated_device import library_path

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.skipif(not library_path().exists(), reason="not built: make test-device")
def test_short_tests_pass_on_the_simulated_accelerator() -> None:
    """All but the slow ones: of the techniques those that are drawn."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "device and not slow"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "tests/testing/simulated_device"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
