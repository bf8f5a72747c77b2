"""What a GPU can show and CPU cannot; `make gpu-check DEVICE=cpu` runs the same code paths on CPU."""

import pytest
from zoo_paths import ZOO

from memtune.autotune.trials import run_trial

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
}


@pytest.fixture(scope="module")
def plain(device):
    return run_trial(str(ZOO["gpt"]), {"settings": {"execution": {"micro_batch": 8}}}, device=device, executor="local")


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


def test_budget_ends_in_out_of_memory(device):
    budget = 2**20 if device == "cpu" else 4 * 2**20
    result = run_trial(
        str(ZOO["gpt"]), {"settings": {"execution": {"micro_batch": 8}}}, device=device, executor="local", budget_bytes=budget
    )
    assert result.status == "oom"
    assert result.reason
