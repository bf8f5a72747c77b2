"""Tests on the simulated accelerator, in a process of their own, where it is built (`make test-device`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.simulated_device import library_path

ROOT = Path(__file__).parents[2]
DRAWN = (
    *("tests/search_spaces/offload/states", "tests/search_spaces/offload/activations"),
    *("tests/search_spaces/recompute/test_planned.py", "tests/search_spaces/sharding/states/test_zero3.py"),
    "tests/test_examples.py",
)
"""Suites on the device in every run, with the drawn cases of each; `make test-device` runs all."""


@pytest.mark.timeout(600)
@pytest.mark.skipif(not library_path().exists(), reason="not built: make test-device")
@pytest.mark.parametrize(
    "tests",
    [
        ("-m", "device and not slow", "tests/testing/simulated_device"),
        ("--on-device", "sim", "-m", "not slow", *DRAWN),
    ],
    ids=["its own", "suites"],
)
def test_short_tests_pass_on_the_simulated_accelerator(tests: tuple[str, ...]) -> None:
    """All but the slow ones: of the techniques those that are drawn."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
