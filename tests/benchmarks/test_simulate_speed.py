"""The synthetic step of the simulator's benchmark is one that `simulate` accepts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from simulate_speed import synthetic_step


def test_synthetic_step_is_valid() -> None:
    synthetic_step().validate()
