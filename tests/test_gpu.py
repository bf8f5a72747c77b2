"""Behaviour that only a GPU can show; `make gpu-check DEVICE=cpu` runs the same code paths on CPU,
`DEVICE=sim` on the simulated accelerator.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.zoo_paths import ZOO

from memtune.autotune.search.trials import run_trial
from memtune.search_spaces.allocator.gmlake import GMLake

pytestmark = pytest.mark.gpu

SETTINGS = {
    "full": {"recompute": {"kind": "full"}},
    "every_nth": {"recompute": {"kind": "every_nth", "n": 2}},
    "selective": {"recompute": {"kind": "selective"}},
    "copy_out": {"offload": {"activations": {"kind": "copy_out", "min_bytes": 0}}},
    "selective and copy_out": {
        "recompute": {"kind": "selective"},
        "offload": {"activations": {"kind": "copy_out", "ratio": 0.5, "min_bytes": 0}},
    },
    "optimizer_cpu": {"offload": {"states": {"kind": "optimizer_cpu"}}},
    "gmlake": {"allocator": {"kind": "gmlake"}},
    "planned_layout": {"allocator": {"kind": "planned_layout"}},
    "lifetime_pools": {"allocator": {"kind": "lifetime_pools"}},
}


@pytest.fixture(scope="module")
def plain(device):
    return run_trial(
        str(ZOO["gpt"]), {"settings": {"execution": {"micro_batch": 8}}}, device=device, executor="local"
    )


def test_plain_trial_runs(plain, device):
    assert plain.status == "ok", plain.log_tail
    assert plain.peak_reserved_bytes >= plain.peak_allocated_bytes > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_first_gradients_are_equal_to_the_bit(name, plain, device):
    config = {"settings": {"execution": {"micro_batch": 8}, **SETTINGS[name]}}
    result = run_trial(str(ZOO["gpt"]), config, device=device, executor="local")
    assert result.status == "ok", result.log_tail
    assert result.gradients_sha256 == plain.gradients_sha256


@pytest.mark.parametrize("name", ["full", "copy_out", "optimizer_cpu"])
def test_device_peak_falls(name, plain, device):
    config = {"settings": {"execution": {"micro_batch": 8}, **SETTINGS[name]}}
    result = run_trial(str(ZOO["gpt"]), config, device=device, executor="local")
    assert result.peak_allocated_bytes < plain.peak_allocated_bytes


@pytest.mark.parametrize("kind", ["gmlake", "planned_layout", "lifetime_pools"])
def test_memtunes_allocator_serves_the_trial(kind, plain, device):
    config = {"settings": {"execution": {"micro_batch": 8}, "allocator": {"kind": kind}}}
    result = run_trial(str(ZOO["gpt"]), config, device=device, executor="local", steps=12)
    assert result.status == "ok", result.log_tail
    assert result.audit["allocator"]["kind"] == kind
    assert result.audit["allocator"]["driver_calls"] > 0
    assert result.peak_reserved_bytes >= result.audit["allocator"]["in_use_bytes"] > 0


def test_stitched_block_reads_back_its_writes(device):
    script = Path(__file__).parents[1] / "benchmarks" / "gpu_allocator.py"
    env = {**os.environ, **GMLake().env(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), "--device", device, "--read-back"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"stitched": 1, "right": True}


@pytest.mark.parametrize("settings", [{}, {"allocator": {"kind": "gmlake"}}], ids=["native", "gmlake"])
def test_budget_ends_in_out_of_memory(settings, device):
    budget = 2**20 if device == "cpu" else 4 * 2**20
    result = run_trial(
        str(ZOO["gpt"]),
        {"settings": {"execution": {"micro_batch": 8}, **settings}},
        device=device,
        executor="local",
        budget_bytes=budget,
    )
    assert result.status == "oom"
    assert result.reason
