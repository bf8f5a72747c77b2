"""User files with names of Python's own modules, in the working directory of model.py, break no part of
memtune.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from memtune.executors.base import Trial, TrialResult
from memtune.executors.local import LocalExecutor

SHADOWED = (
    "random",
    "types",
    "logging",
    "queue",
    "json",
    "statistics",
    "resource",
    "ctypes",
    "uuid",
    "secrets",
    "tempfile",
    "select",
)
MODEL = """
import random
from torch import nn, randn
import helper

def model():
    return nn.Linear(helper.WIDTH, random.randint(1, 1))

def batch(size):
    return randn(size, helper.WIDTH)

def loss(model, batch):
    return model(batch).square().mean()
"""
RAY = """
import sys
from memtune.executors.base import Trial, TrialResult
from memtune.executors.ray.executor import RayExecutor
executor = RayExecutor(ranks=1, log_dir=sys.argv[1], command=sys.argv[3:])
executor.submit(Trial.model_validate_json(sys.argv[2]))
events = []
while not any(isinstance(each, TrialResult) for each in events):
    events += executor.wait(60)
executor.close()
print(events[-1].model_dump_json())
"""


@pytest.fixture
def shadows(tmp_path, monkeypatch):
    """The working directory: every module named in SHADOWED fails there when it is imported."""
    folder = tmp_path / "user"
    folder.mkdir()
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('this is the {name} of the user')")
    (folder / "helper.py").write_text("WIDTH = 8")
    (folder / "model.py").write_text(MODEL)
    monkeypatch.chdir(folder)
    return folder


def test_local_trial_ignores_shadowing_modules(shadows, tmp_path):
    executor = LocalExecutor(log_dir=tmp_path / "logs")
    executor.submit(Trial(number=0, workload="model.py", config={"settings": {}}, steps=1, global_batch=4))
    results = []
    while not results:
        results = [each for each in executor.wait(60) if isinstance(each, TrialResult)]
    executor.close()
    assert (results[0].status, results[0].reason) == ("ok", ""), results[0].log_tail


def test_probe_ignores_shadowing_modules(shadows):
    from memtune.executors.preflight import probe

    assert probe("model.py").imports_torch


@pytest.mark.ray
@pytest.mark.slow
def test_ray_workers_ignore_shadowing_modules(shadows, ground):
    command = [
        sys.executable,
        "-P",
        "-c",
        RAY,
        str(ground.logs),
        ground.trial("well").model_dump_json(),
        *ground.command,
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    result = TrialResult.model_validate_json(run.stdout)
    assert (result.status, result.reason) == ("ok", ""), run.stderr
