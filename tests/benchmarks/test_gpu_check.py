"""Benchmarks of `make gpu-check` can be started in the environment that it creates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / ".ci" / "gpu-check").read_text()
PROGRAMS = dict.fromkeys(re.findall(r"benchmarks/\w+\.py(?= --device)", SCRIPT))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("program", PROGRAMS)
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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run all checks")
def test_gpu_check_without_a_gpu_is_one_message() -> None:
    done = subprocess.run(
        [ROOT / ".ci" / "gpu-check", "cuda"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert f"torch of {sys.executable} sees no GPU: {torch.__version__}" in done.stderr
    assert "nvidia-smi" in done.stderr
