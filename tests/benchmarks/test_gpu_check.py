"""Benchmarks of `make gpu-check` can be started in the environment that it creates."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / ".ci" / "gpu-check").read_text()


@pytest.mark.parametrize("program", re.findall(r"benchmarks/\w+\.py(?= --device)", SCRIPT))
def test_gpu_check_benchmarks_can_be_imported(program: str) -> None:
    settings = re.search(r"^export .*$", SCRIPT, re.MULTILINE)
    assert settings is not None
    done = subprocess.run(
        ["bash", "-c", f'site={ROOT} device=cpu; {settings[0]}; "$0" {program} --help', sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "--device" in done.stdout
