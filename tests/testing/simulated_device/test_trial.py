"""`memtune trial --device sim`: its worker processes start the simulated accelerator too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.zoo_paths import ZOO

from memtune.autotune.predict import link_benchmark

pytestmark = [pytest.mark.device, pytest.mark.slow]
SITE = Path(__file__).parents[2] / "support" / "simulated_site"


def test_trial_measures_reserved_bytes(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "memtune: 1\nsettings:\n  execution: {micro_batch: 4}\n"
        "  offload: {activations: {kind: copy_out, min_bytes: 0}}\n"
    )
    command = [sys.executable, "-m", "memtune", "trial", str(ZOO["gpt"]), "--config", str(config)]
    done = subprocess.run(
        # The limit is that of the training: memtune's own measurements after it take more.
        [*command, "--device", "sim", "--executor", "local", "--json", "--max-memory", "8MiB"],
        env=os.environ | {"PYTHONPATH": str(SITE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["peak_reserved_bytes"] >= found["peak_allocated_bytes"] > 0
    assert found["peak_reserved_bytes"] == 8 << 20


def test_link_between_two_devices_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank on a device of its own, with a group that sends nothing of the host."""
    monkeypatch.setenv("PYTHONPATH", str(SITE))
    rate, step_s = link_benchmark.measure("sim", large_bytes=1 << 12)
    assert rate > 0
    assert step_s > 0
