from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import zoo_paths
from support.search.prepared_search import AXES, Probed

from memtune.autotune.predict import AllocatorSettings, TightSetting
from memtune.autotune.search import plan_report
from memtune.autotune.search.plan_report import PlanReport
from memtune.autotune.search.trials import run_trial
from memtune.autotune.space import Remedy
from memtune.autotune.space.search_options import PlanOptions
from memtune.autotune.ui import formatting
from memtune.autotune.ui.formatting import grouped
from memtune.autotune.ui.plan_text import render
from memtune.config import load_config
from memtune.errors import ConfigError, UsageError
from memtune.executors import LocalExecutor

GPT, TIED = str(zoo_paths.ZOO["gpt"]), str(zoo_paths.ZOO["tied"])
BUDGET = 6 * 2**20
plan = partial(plan_report.plan, begun=Probed())  # type: ignore[arg-type]
WIDE = """
import torch
from torch import nn

def model(): return nn.ModuleDict({"h": nn.ModuleList(nn.Linear(512, 512) for _ in range(4))})
def batch(size): return torch.randn(size, 512)
def loss(model, x):
    for block in model["h"]:
        x = block(x).tanh()
    return x.mean()
global_batch = 2
"""
COMPOSED = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.parts(x).unflatten(-1, (3, 64)).unbind(-2)
        return torch.softmax(q @ k.mT / 8, -1) @ v

def model(): return nn.Sequential(nn.Linear(64, 64), Attention(), nn.Linear(64, 64))
def batch(size): return torch.randn(size, 32, 64)
def loss(model, x): return model(x).square().mean()
global_batch = 2
"""
FULL = "settings: {execution: {micro_batch: 4, accumulate: 2}, recompute: {kind: full}}\n"


def asked(**changes: Any) -> PlanOptions:
    return replace(PlanOptions(workload=GPT, gpu_type="h100-80g", axes=AXES), **changes)


@pytest.fixture(scope="module")
def ranking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlanReport]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "CUBLAS_WORKSPACE_CONFIG", ":16:8"
        )  # two workspaces of 32 MiB would be all there is to see
        out = tmp_path_factory.mktemp("plan") / "tuned.yaml"
        yield plan(asked(budget_bytes=BUDGET, top=10, out=out, row=2, why_not="recompute=none"))


def test_plan_ranks_fastest_fitting_first_without_gpu(ranking: PlanReport):
    fitting = [each for each in ranking.rows if each.status in ("ok", "tight")]
    assert fitting
    assert list(ranking.rows[: len(fitting)]) == fitting
    times = [each.step_s or 0 for each in fitting]
    assert times == sorted(times)
    assert all((each.peak_allocated_bytes or 0) <= BUDGET for each in fitting)
    assert ranking.n_pruned > 0
    assert len(ranking.rows) <= 10


MIB = 2**20


@pytest.mark.parametrize(
    ("fits", "retries", "status", "says"),
    [
        ((True, True), 3, "tight", "3 times a step, which takes 2.00 ms; PYTORCH_ALLOC_CONF=expand"),
        ((True, True), 0, "tight", "asks again, in the first steps only; PYTORCH_ALLOC_CONF=expand"),
        (
            (True, False),
            3,
            "tight",
            "runs out of memory, whose free parts are too small for some tensor; PYT",
        ),
        ((False, False), 3, "oom", "runs out of memory, whose free parts are too small for some tensor"),
    ],
)
def test_plan_tells_by_replays_whether_a_tight_config_runs(
    fits: tuple[bool, bool], retries: int, status: str, says: str
):
    ranked = (
        TightSetting("expandable_segments:True", 90 * MIB, 0, 0.0, fits[0]),
        TightSetting("", 99 * MIB, retries, 0.002 if retries else 0.0, fits[1]),
    )
    row = plan_report.PlanRow("", {}, "tight", peak_reserved_bytes=110 * MIB, step_s=0.1, samples_per_s=40.0)
    found = plan_report._replayed(row, ranked, AllocatorSettings(), 100 * MIB)
    assert (found.status, found.allocators) == (status, ranked)
    assert found.reason.startswith("110 MiB would be reserved, more than 100 MiB: ")
    assert says in found.reason
    assert ("PYTORCH_ALLOC_CONF" in found.reason) == fits[0]
    is_slower = fits[1] and retries > 0
    assert found.step_s == pytest.approx(0.102 if is_slower else 0.1)
    assert found.samples_per_s == pytest.approx(40 / 1.02 if is_slower else 40.0)


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


def shown(report: PlanReport, *, width: int = 130, **options: Any) -> str:
    report = replace(report, facts={**report.facts, "other_load": 0.0})  # a busy machine adds a line
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    console.print(render(report, **options))
    return console.export_text()


def test_plan_answers_before_it_lists(ranking: PlanReport):
    text = shown(ranking, command=["memtune", "plan", "model.py", "--gpu-type", "h100-80g", "--gpus", "8"])
    head = text.splitlines()[:9]
    assert "235k parameters" in head[0]
    assert "uncalibrated" in head[1]
    assert head[3].startswith(f"do this   {ranking.front[0].sentence[:40]}")
    assert any(line.startswith("gains") and "your setting, which does not fit" in line for line in head)
    assert any(line.startswith("costs") and "bitwise" in line for line in head)
    assert f"memtune trial model.py --config {ranking.out}" in text
    assert "memory of row 1 at its peak" in text
    assert "recompute: none keeps every activation for backward" in text
    assert "refused     " not in text
    assert "refused     " in shown(ranking, why=True)


def test_plan_advice_names_micro_batches_other_than_the_users(ranking: PlanReport):
    plain = replace(ranking.baselines[0], micro_batch=8, accumulate=1)
    smaller = replace(ranking.front[0], micro_batch=2, accumulate=4)
    for sentence, advice in (
        ("changes nothing", "runs 4 micro-batches of 2 samples a step\n"),
        ("shards", "runs 4 micro-batches of 2 samples a step; shards\n"),
    ):
        first = replace(smaller, sentence=sentence)
        assert f"do this   {advice}" in shown(replace(ranking, baselines=(plain,), front=(first,)))


def test_plan_keeps_its_numbers_on_a_narrow_terminal(ranking: PlanReport):
    wide, narrow = shown(ranking), shown(ranking, width=40)
    assert all(len(line) <= 40 for line in narrow.splitlines())
    assert "…" not in narrow
    assert "\nfull recompute: recomputes every" in narrow
    first = ranking.front[0]
    assert f"samples/s {formatting.rate(first.samples_per_s)}" in " ".join(narrow.split())
    assert "samples/s" in wide
    assert f"samples/s {formatting.rate(first.samples_per_s)}" not in wide  # a column there


def test_plan_names_the_commands_that_write_and_measure(ranking: PlanReport):
    command = ["memtune", "plan", "model.py", "--gpu-type", "h100-80g", "--gpus", "8", "--why", "--top=3"]
    text = shown(replace(ranking, out=None), command=command)
    assert "memtune plan model.py --gpu-type h100-80g --gpus 8 --why --top=3 --out tuned.yaml" in text
    assert "memtune search model.py --gpus 8  " in text


@pytest.mark.parametrize("status", ["ok", "tight"])
def test_plan_explains_the_words_of_its_table(status: str, ranking: PlanReport):
    rows = tuple(replace(each, status=status) for each in ranking.front)
    text = " ".join(shown(replace(ranking, baselines=(), front=rows)).split())
    assert ("tight: the tensors fit, but PyTorch's allocator" in text) == (status == "tight")
    assert ("largest: the largest micro-batch" in text) == any(each.largest_micro_batch for each in rows)


def test_plan_advises_to_change_nothing_if_nothing_is_faster(ranking: PlanReport):
    plain = replace(
        ranking.baselines[0], status="ok", samples_per_s=2 * (ranking.front[0].samples_per_s or 0)
    )
    text = shown(replace(ranking, baselines=(plain,), out=None))
    assert "do this   keep your own setting" in text
    assert f"it has    {formatting.rate(plain.samples_per_s)} samples/s" in text
    assert "gains" not in text
    assert "--out" not in text


def test_plan_advises_by_its_goal(ranking: PlanReport):
    first = ranking.front[0]
    plain = replace(ranking.baselines[0], status="ok", samples_per_s=2 * (first.samples_per_s or 0))
    for goal, advice in (("memory", first.sentence[:30]), ("batch", "keep your own setting")):
        report = replace(ranking, baselines=(plain,), facts={**ranking.facts, "goal": goal})
        assert f"do this   {advice}" in shown(report)


def test_plan_says_that_a_row_is_slower_than_a_baseline(ranking: PlanReport):
    plain, full = ranking.baselines
    faster = replace(full, samples_per_s=2 * (ranking.front[0].samples_per_s or 0))
    text = " ".join(shown(replace(ranking, baselines=(plain, faster))).split())
    assert "50% slower than full recompute" in text


def test_plan_says_what_would_help_if_nothing_fits(ranking: PlanReport):
    text = shown(replace(ranking, front=(), remedies=(Remedy("--freeze recompute=full", 2**20, 1.3),)))
    assert "--freeze recompute=full: 1.00 MiB, 1.3× the time per sample; recomputes every block" in text


def test_plan_of_weights_over_the_limit_starts_off_the_device(tmp_path: Path):
    (tmp_path / "wide.py").write_text(WIDE)
    options = PlanOptions(
        workload=str(tmp_path / "wide.py"),
        device="cpu",
        budget_bytes=3 * 2**20,
        axes=("offload.states",),
    )
    found = plan(options)
    assert found.front[0].peak_allocated_bytes <= 3 * 2**20
    assert found.front[0].unmet == ()
    assert "but       the model cannot" not in shown(found)
    config = tmp_path / "config.yaml"
    config.write_text("settings: {offload: {states: {kind: optimizer_cpu}}}\n")
    kept = plan(replace(options, config=str(config))).config
    assert kept is not None
    assert "weights need 4.01 MiB on the device before memtune.apply" in kept.unmet[0]


def test_plan_writes_the_config_of_a_row(ranking: PlanReport):
    assert ranking.out is not None
    written = load_config(ranking.out)
    assert written.settings.dump() == ranking.front[1].settings
    assert written.predicted["peak_bytes"] == ranking.front[1].peak_allocated_bytes
    assert written.made_for is not None
    assert written.made_for.hardware == "h100-80g"


def test_plan_row_beyond_the_table_is_refused():
    with pytest.raises(UsageError, match=r"--row 99: the table has \d+ rows"):
        plan(asked(workload=TIED, axes=("execution",), out=Path("never.yaml"), row=99))


def test_plan_counts_tokens_of_a_batch_that_has_them(ranking: PlanReport):
    first, per_sample = ranking.front[0], ranking.facts["tokens_per_sample"]
    assert per_sample == 32
    assert first.tokens_per_s == pytest.approx(per_sample * (first.samples_per_s or 0))


@pytest.mark.parametrize(
    ("kind", "reason"), [("memory_budget", "only compiled graphs"), ("recompute=full", "samples/s")]
)
def test_plan_says_why_a_technique_is_not_used(kind: str, reason: str):
    (found,) = plan(asked(workload=TIED, why_not=kind, axes=("recompute",))).absences
    assert reason in found.reason


def test_plan_of_an_unknown_technique_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("memtune.autotune.search.plan_report.prepare")
    with pytest.raises(UsageError, match="Did you mean 'selective'"):
        plan(asked(why_not="selectiv"))


def test_plan_of_config_is_one_object(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text(FULL)
    report = plan(asked(config=config, gpu_type=None, device="cpu", out=tmp_path / "tuned.yaml"))
    assert load_config(tmp_path / "tuned.yaml").predicted
    console = Console(record=True, width=160, file=io.StringIO())
    console.print(render(report))
    assert "memtune trial model.py --config" in console.export_text()
    document = report.to_dict()
    assert document["status"] == "ok"
    assert document["settings"]["recompute"] == {"kind": "full"}
    assert document["micro_batch"] == 4
    assert document["step_s"] > 0
    assert document["peak_reserved_bytes"] >= document["peak_allocated_bytes"] > 2**20


def test_plan_shows_that_attention_keeps_its_scores(tmp_path: Path):
    model = tmp_path / "attention.py"
    model.write_text(COMPOSED)
    config = tmp_path / "c.yaml"
    config.write_text("settings: {execution: {micro_batch: 2}}\n")
    report = plan(asked(workload=str(model), config=config))
    console = Console(record=True, width=300, file=io.StringIO())
    console.print(render(report))
    shown = console.export_text()
    assert "attention is computed from its parts 1 times" in shown
    assert "nn.MultiheadAttention needs need_weights=False" in shown
    assert all(each not in shown for each in report.recording_notes)


def test_plan_shows_that_batches_vary(tmp_path: Path):
    """Only searches did: a plan's peak is of the largest drawn batch, and training may draw larger ones."""
    model, config = tmp_path / "varying.py", tmp_path / "c.yaml"
    config.write_text("settings: {execution: {micro_batch: 4}}\n")
    found = []
    for worst in ("", "\ndef worst_batch(size): return batch_of(size, 64)\n"):
        model.write_text(Path("tests/support/models/varying_lengths.py").read_text() + worst)
        report = plan(asked(workload=str(model), config=config, gpu_type=None, device="cpu"))
        found.append("worst_batch(size) in model.py gives the largest" in shown(report, width=400))
    assert found == [True, False]


def test_plan_micro_batch_option_overrides_config(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text(FULL)
    small = plan(asked(workload=TIED, config=config, micro_batch=2)).config
    large = plan(asked(workload=TIED, config=config, micro_batch=16)).config
    assert small is not None
    assert large is not None
    assert (small.micro_batch, large.micro_batch) == (2, 16)
    assert (small.peak_allocated_bytes or 0) < (large.peak_allocated_bytes or 0)


@pytest.mark.slow
def test_plan_on_cpu_records_size_with_kernel_scratch(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text(FULL)
    report = plan(asked(workload=TIED, config=config, micro_batch=6, gpu_type=None, device="cpu"))
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
    found = plan(asked(workload=TIED, config=config)).config
    assert found is not None
    assert found.status == "unfit"
    assert found.reason


def test_plan_says_what_a_plan_cannot_do(tmp_path: Path):
    config = tmp_path / "c.yaml"
    config.write_text("settings: {offload: {activations: {kind: tsplit, share: 0.5, min_bytes: 64}}}")
    model = "tests/support/models/tiling/language_models.py:large"
    report = plan(asked(workload=model, config=config, micro_batch=2, gpu_type=None, device="cpu"))
    assert report.config is not None
    (line,) = report.config.unmet
    assert "tsplit splits nothing" in line
    assert line in shown(report, command=["memtune", "plan", model])


@pytest.mark.slow
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


def test_plan_peak_equals_real_trial(tmp_path: Path, local_executor: LocalExecutor):
    config = tmp_path / "c.yaml"
    config.write_text(FULL)
    predicted = plan(asked(config=config, gpu_type=None, device="cpu")).config
    measured = run_trial(GPT, config, executor=local_executor, steps=2)
    assert predicted is not None
    assert measured.status == "ok", measured.log_tail
    assert len(measured.losses) == 4
    assert measured.gradients_sha256
    assert measured.peak_allocated_bytes is not None
    assert predicted.peak_allocated_bytes == pytest.approx(measured.peak_allocated_bytes, rel=0.02)


def test_trial_over_budget_is_oom_result(local_executor: LocalExecutor):
    result = run_trial(GPT, {"settings": {}}, executor=local_executor, budget_bytes=3 * 2**20, micro_batch=8)
    assert result.status == "oom"
    assert "out of memory" in result.reason


def test_plan_groups_refusals_that_differ_in_numbers_and_names() -> None:
    refused = {
        "needs 1.50 TiB (fix)": 2,
        "other": 3,
        "needs 900 GiB (another fix)": 4,
        "with l2l it needs a budget": 5,
        "with dtr it needs a budget": 1,
    }
    assert grouped(refused) == {
        "needs 900 GiB · 2 alike": 6,
        "other": 3,
        "with l2l it needs a budget · 2 alike": 6,
    }
