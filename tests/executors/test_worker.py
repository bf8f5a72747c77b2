"""Gradients that a trial reports, including those freed in backward; and models larger than the budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.suites.layer_major_suite import CHAIN, config
from support.zoo_paths import ZOO

from memtune.autotune.search.trials import run_trial
from memtune.executors import LocalExecutor, worker
from memtune.executors.base import Trial, TrialResult
from memtune.search_spaces import find
from memtune.ssd import offload_dir

EXECUTION = {"micro_batch": 2, "accumulate": 2}


def trial(settings: dict[str, Any], executor: LocalExecutor) -> TrialResult:
    document = {"settings": {"execution": EXECUTION, **settings}}
    return run_trial(str(ZOO["gpt"]), document, executor=executor, steps=1, warmup_steps=1)


@pytest.fixture(scope="module")
def plain(local_executor: LocalExecutor) -> TrialResult:
    return trial({}, local_executor)


@pytest.mark.parametrize(
    "settings",
    [
        {"offload": {"states": {"kind": "zero_offload", "bucket_mib": 0.1}}},
        pytest.param({"execution": EXECUTION | {"order": {"kind": "roam"}}}, marks=pytest.mark.slow),
        pytest.param(
            {"offload": {"states": {"kind": "optimizer_cpu", "update": "native", "trigger": "per_layer"}}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"offload": {"states": {"kind": "l2l"}}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_worker_reports_gradients_freed_in_backward(
    plain: TrialResult, settings: dict[str, Any], local_executor: LocalExecutor
) -> None:
    found = trial(settings, local_executor)
    assert found.status == "ok", found.log_tail
    assert found.losses[0] == plain.losses[0]
    assert found.gradients_sha256 == plain.gradients_sha256


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["harmony", "mobius", "angel_ptm", "patrickstar"])
def test_worker_reports_gradients_of_host_weights(kind: str, local_executor: LocalExecutor) -> None:
    """Those that are used in backward, and those that wait on the host for the step."""
    with_plan = config(find("offload.states", kind)(kind=kind), 2).document()
    found, plain = (
        run_trial(str(CHAIN), each, executor=local_executor, steps=1, warmup_steps=1)
        for each in (with_plan, {"settings": {"execution": EXECUTION}})
    )
    assert found.status == "ok", found.log_tail
    assert found.gradients_sha256 == plain.gradients_sha256


LARGE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

def model(): return nn.Sequential(*(Block() for _ in range(16)))
def batch(size): return torch.randn(size, 64)
def loss(model, batch): return model(batch).square().mean()
def optimizer(params): return torch.optim.SGD(params, lr=0.01)
"""
LARGE_BYTES = 16 * 4 * (2 * 64 * 512 + 512 + 64)


@pytest.mark.slow
def test_worker_builds_large_model_in_shards(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(LARGE)
    document = {"settings": {"execution": {"micro_batch": 2}, "sharding": {"states": {"kind": "zero3"}}}}
    each: dict[str, Any] = {"executor": "local", "ranks": 4, "steps": 1, "warmup_steps": 1}
    whole = run_trial(str(tmp_path / "large.py"), document, **each)
    shards = run_trial(str(tmp_path / "large.py"), document, budget_bytes=int(0.95 * LARGE_BYTES), **each)
    assert (shards.status, shards.losses) == ("ok", whole.losses), shards.log_tail
    plain = run_trial(
        str(tmp_path / "large.py"),
        {"settings": {}},
        budget_bytes=int(0.95 * LARGE_BYTES),
        **{**each, "ranks": 1},
    )
    assert plain.status == "oom"


def test_worker_starts_a_large_model_off_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_executor: LocalExecutor
) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    file = str(Path(__file__).parents[1] / "support" / "models" / "weights_in_blocks.py")
    each: dict[str, Any] = {"executor": local_executor, "steps": 1, "warmup_steps": 1}
    whole = run_trial(file, {"settings": {}}, **each)
    for tier in ("host", "ssd"):
        document = {"settings": {"offload": {"states": {"kind": "zero_infinity", "parameters": tier}}}}
        found = run_trial(file, document, budget_bytes=4 << 20, **each)
        assert (found.status, found.losses) == ("ok", whole.losses), found.log_tail


def test_worker_measures_the_peak_of_the_declared_worst_batch(
    tmp_path: Path, local_executor: LocalExecutor
) -> None:
    document = {"settings": {"execution": EXECUTION}}

    def run(declaration: str) -> TrialResult:
        (tmp_path / "model.py").write_text(LARGE + declaration)
        path = str(tmp_path / "model.py")
        return run_trial(path, document, executor=local_executor, steps=1, warmup_steps=2)

    plain, hidden_bytes = run(""), 16 * 4 * 512 * EXECUTION["micro_batch"]
    for declaration in (
        "worst_batch(size): return torch.randn(50 * size, 64)",
        "buckets(size): return [torch.randn(50 * size, 64), torch.randn(2 * size, 64)]",
    ):
        worst = run(f"\ndef {declaration}\n")
        assert worst.status == "ok", worst.log_tail
        assert worst.losses[0] == plain.losses[0]
        assert worst.peak_allocated_bytes - plain.peak_allocated_bytes > 49 * hidden_bytes


def test_worker_measures_the_peak_of_the_largest_batch_that_was_drawn(
    tmp_path: Path, local_executor: LocalExecutor
) -> None:
    def run(declaration: str) -> TrialResult:
        (tmp_path / "model.py").write_text(f"{LARGE}\ndef {declaration}\n")
        path = str(tmp_path / "model.py")
        return run_trial(path, {"settings": {"execution": EXECUTION}}, executor=local_executor, steps=1)

    found = run("batch(size): return torch.randn(size * (1 if int(torch.randint(0, 8, ())) else 50), 64)")
    assert found.status == "ok", found.log_tail
    largest = run("worst_batch(size): return torch.randn(50 * size, 64)")
    assert found.peak_allocated_bytes == largest.peak_allocated_bytes


def test_worker_seeds_python_and_numpy(tmp_path: Path, local_executor: LocalExecutor) -> None:
    """Else the losses of two settings could not be compared."""
    draws = "import random\nimport numpy as np\n"
    batch = "def batch(size): return torch.from_numpy(np.random.rand(size, 64)).float()\n"
    loss = "def loss(model, batch): return model(batch).square().mean() * (1 + random.random())\n"
    (tmp_path / "model.py").write_text(LARGE + draws + batch + loss)
    document, path = {"settings": {"execution": EXECUTION}}, str(tmp_path / "model.py")
    one, other = (run_trial(path, document, executor=local_executor, steps=1) for _ in range(2))
    assert one.status == "ok", one.log_tail
    assert one.losses == other.losses


def test_worker_reports_a_lost_device_as_a_crash_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(rank: object) -> dict[str, Any]:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    (tmp_path / "trial").write_text(Trial(number=0, workload="model.py", config={}).model_dump_json())
    monkeypatch.setenv("MEMTUNE_TRIAL_FILE", str(tmp_path / "trial"))
    with (tmp_path / "report").open("w") as report:
        monkeypatch.setenv("MEMTUNE_REPORT_FD", str(report.fileno()))
        monkeypatch.setattr(worker, "run", lost)
        assert worker.main() == 0
    record = json.loads((tmp_path / "report").read_text().splitlines()[-1])["result"]
    assert (record["status"], record["code"], record["exit_code"]) == ("crash", "MT133", 3)
    assert "unspecified launch failure" in record["reason"]
