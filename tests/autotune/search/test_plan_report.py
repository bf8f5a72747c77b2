from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import zoo_paths

from memtune.autotune.search.plan_report import PlanReport, plan
from memtune.autotune.search.trials import run_trial
from memtune.autotune.space.search_options import PlanOptions
from memtune.autotune.ui.plan_text import merged, render
from memtune.errors import ConfigError, UsageError

GPT = str(zoo_paths.ZOO["gpt"])
BUDGET = 6 * 2**20
FULL = "settings: {execution: {micro_batch: 4, accumulate: 2}, recompute: {kind: full}}\n"


def asked(**changes: Any) -> PlanOptions:
    return replace(
        PlanOptions(workload=GPT, gpu_type="h100-80g", axes=("recompute", "execution", "offload")), **changes
    )


@pytest.fixture(scope="module")
def ranking() -> Iterator[PlanReport]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "CUBLAS_WORKSPACE_CONFIG", ":16:8"
        )  # two workspaces of 32 MiB would be all there is to see
        yield plan(asked(budget_bytes=BUDGET, top=10))


def test_plan_ranks_fastest_fitting_first_without_gpu(ranking: PlanReport):
    fitting = [each for each in ranking.rows if each.status == "ok"]
    assert fitting
    assert list(ranking.rows[: len(fitting)]) == fitting
    times = [each.step_s or 0 for each in fitting]
    assert times == sorted(times)
    assert all((each.peak_allocated_bytes or 0) <= BUDGET for each in fitting)
    assert ranking.n_pruned > 0
    assert len(ranking.rows) <= 10


def test_plan_includes_baselines(ranking: PlanReport):
    plain, full = ranking.baselines
    assert (plain.baseline, plain.status) == ("plain", "oom")
    assert "over the budget" in plain.reason
    assert (full.baseline, full.status) == ("full recompute", "ok")


def test_plan_document_is_plain_and_versioned(ranking: PlanReport):
    document = json.loads(json.dumps(ranking.to_dict()))
    assert document["schema"] == 1
    assert {
        "candidates",
        "baselines",
        "n_candidates",
        "n_pruned",
        "n_unfit",
        "unfit",
        "budget_bytes",
        "parameters",
    } <= document.keys()
    assert {"settings", "status", "peak_allocated_bytes", "step_s", "micro_batch", "prediction"} <= document[
        "candidates"
    ][0].keys()
    assert document["candidates"][0]["prediction"]["calibrated"] is False


def test_plan_table_is_marked_uncalibrated(ranking: PlanReport):
    console = Console(width=130, record=True, file=open("/dev/null", "w"))
    console.print(render(ranking))
    text = console.export_text()
    assert "0.2349M parameters" in text
    assert text.count("uncalibrated") > 3  # the head, and the chance of running out of memory of every row
    assert "out of memory" in text
    assert "full recompute" in text
    assert " over" in text
    assert "pruned" in text


def test_plan_of_config_is_one_object(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text(FULL)
    document = plan(asked(config=config, gpu_type=None, device="cpu")).to_dict()
    assert document["status"] == "ok"
    assert document["settings"]["recompute"] == {"kind": "full"}
    assert document["micro_batch"] == 4
    assert document["step_s"] > 0
    assert document["peak_reserved_bytes"] >= document["peak_allocated_bytes"] > 2**20


def test_plan_micro_batch_option_overrides_config(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text(FULL)
    small = plan(asked(config=config, micro_batch=2)).config
    large = plan(asked(config=config, micro_batch=16)).config
    assert small is not None
    assert large is not None
    assert (small.micro_batch, large.micro_batch) == (2, 16)
    assert (small.peak_allocated_bytes or 0) < (large.peak_allocated_bytes or 0)


def test_plan_on_cpu_records_size_with_kernel_scratch(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text(FULL)
    report = plan(asked(config=config, micro_batch=6, gpu_type=None, device="cpu"))
    assert not any("workspaces were not measured" in note for note in report.notes)
    assert any(
        "micro-batch 6 was recorded" in note
        for note in plan(
            asked(
                workload=str(zoo_paths.ZOO["lstm"]), config=config, micro_batch=6, gpu_type=None, device="cpu"
            )
        ).notes
    )


def test_plan_of_unusable_config_is_unfit_with_reason(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text("settings: {sharding: {states: {kind: fsdp}}}")
    found = plan(asked(config=config)).config
    assert found is not None
    assert found.status == "unfit"
    assert found.reason


def test_plan_keeps_micro_batch_if_split_is_lossy():
    found = plan(asked(workload=str(zoo_paths.ZOO["cnn_bn"]), axes=("execution", "recompute")))
    assert {each.accumulate for each in found.rows} == {1}
    assert any("BatchNorm" in note for note in found.notes)


def test_plan_names_misspelt_options(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text("settings: {recompte: {kind: full}}")
    with pytest.raises(ConfigError, match="recompte"):
        plan(asked(config=config))
    with pytest.raises(UsageError, match="h100-80x"):
        plan(asked(gpu_type="h100-80x"))


def test_plan_refuses_budget_above_device_memory():
    with pytest.raises(UsageError, match=r"200 GiB is over the 79\.1 GiB of h100") as caught:
        plan(asked(budget_bytes=200 * 2**30))
    assert caught.value.fix.startswith("--max-memory 78.")


def test_plan_imports_neither_optuna_nor_ray():
    code = (
        "import sys, memtune.autotune.search.plan_report; print([m for m in ('optuna', 'ray', 'textual',"
        " 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_plan_peak_equals_real_trial(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text(FULL)
    predicted = plan(asked(config=config, gpu_type=None, device="cpu")).config
    measured = run_trial(GPT, config, device="cpu", steps=2)
    assert predicted is not None
    assert measured.status == "ok", measured.log_tail
    assert len(measured.losses) == 4
    assert measured.gradients_sha256
    assert measured.peak_allocated_bytes is not None
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.02)


def test_trial_over_budget_is_oom_result(tmp_path: Path):
    result = run_trial(GPT, {"settings": {}}, budget_bytes=3 * 2**20, micro_batch=8)
    assert result.status == "oom"
    assert "out of memory" in result.reason


def test_plan_merges_refusals_that_differ_in_bytes() -> None:
    refused = {"needs 1.50 TiB (fix)": 2, "other": 3, "needs 900 GiB (fix)": 4, "needs 20 of 3 (fix)": 5}
    assert merged(refused) == {
        "needs 900 GiB (fix) · the least of 2 such": 6,
        "other": 3,
        "needs 20 of 3 (fix)": 5,
    }
