"""The dry run against the passes, op by op, and what it says where fake tensors are not enough."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
from rich.console import Console
from support.search.prepared_search import Probed
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.record.recorder import record
from memtune.autotune.search.dry_runs import dry_run
from memtune.autotune.search.plan_report import EXACT_ROWS, plan
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.autotune.space.search_options import PlanOptions
from memtune.autotune.ui.plan_text import render
from memtune.memory.workspace import WorkspaceTable
from memtune.program.step import Step, Tier
from memtune.technique import Reason, Target
from memtune.testing.drift_check import compare, recording_of
from memtune.workload.workload import Workload

FSDP = {"sharding": {"states": {"kind": "fsdp"}}}
EVERYTHING = {
    "recompute": {"kind": "selective"},
    "offload": {"activations": {"kind": "copy_out", "min_bytes": 0}, "states": {"kind": "optimizer_cpu"}},
}


@cache
def workload(model: str) -> Workload:
    return Workload.load(ZOO[model])


def candidate(model: str, settings: dict[str, Any], ranks: int, **execution: int) -> tuple[Candidate, Target]:
    target = Target(hardware.detect("cpu"), ranks)
    document = {"execution": {"micro_batch": 2, **execution}, **settings}
    found = Rewriter(recording_of(ZOO[model]), target).candidate(Choice.from_document(document))
    assert isinstance(found, Candidate), found
    return found, target


def dry(model: str, settings: dict[str, Any], ranks: int = 1, **execution: int) -> Step | Reason:
    found, target = candidate(model, settings, ranks, **execution)
    return dry_run(workload(model), found, target, rung=recording_of(ZOO[model]).rung)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model", ["gpt", "cnn_bn", "tobf16"])
def test_dry_run_peak_equals_pass_prediction(model: str) -> None:
    step = dry(model, EVERYTHING)
    assert isinstance(step, Step)
    assert compare(candidate(model, EVERYTHING, 1)[0].program.step, step) == ""


def test_dry_run_uses_fake_ranks() -> None:
    step = dry("gpt", FSDP | EVERYTHING, 8)
    assert isinstance(step, Step)
    assert step.peak_bytes() == candidate("gpt", FSDP | EVERYTHING, 8)[0].program.step.peak_bytes()
    assert not dist.is_initialized()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_dry_run_of_sharded_states_with_accumulation(kind: str) -> None:
    settings = EVERYTHING | {"sharding": {"states": {"kind": kind}}}
    step = dry("gpt", settings, 4, accumulate=2)
    assert isinstance(step, Step)
    predicted = candidate("gpt", settings, 4, accumulate=2)[0].program.step.peak_bytes()
    assert 0 <= step.peak_bytes() - predicted <= 16  # the sum of the losses, and the loss that is divided


@pytest.mark.parametrize(
    "kind", [{"kind": "zero_offload", "bucket_mib": 0.02}, {"kind": "optimizer_cpu", "trigger": "per_layer"}]
)
def test_dry_run_sums_offloaded_gradients_on_host(kind: dict[str, Any]) -> None:
    settings = {"offload": {"states": {"update": "native", **kind}}}
    step = dry("tied", settings, accumulate=2)
    assert isinstance(step, Step)
    predicted = candidate("tied", settings, 1, accumulate=2)[0].program.step
    assert 0 <= step.peak_bytes() - predicted.peak_bytes() <= 16  # the sum of the losses
    batch = int(
        predicted.ops.traffic_bytes[
            predicted.ops.name == predicted.names.index("memtune.to_device.default")
        ].sum()
    )
    assert (
        0 <= step.peak_bytes(Tier.HOST) - predicted.peak_bytes(Tier.HOST) <= batch
    )  # the other micro-batch's


def test_dry_runs_of_sharded_model_use_separate_meshes() -> None:
    settings = {"sharding": {"states": {"kind": "fsdp", "degree": 2}}}
    step = dry("gpt", settings, 4)
    assert isinstance(step, Step)
    assert step.peak_bytes() == candidate("gpt", settings, 4)[0].program.step.peak_bytes()


def test_dry_run_traces_at_most_two_micro_batches() -> None:
    two, eight = (dry("gpt", {}, accumulate=count) for count in (2, 8))
    assert isinstance(two, Step)
    assert isinstance(eight, Step)
    assert eight.ops.n == two.ops.n
    predicted = candidate("gpt", {}, 1, accumulate=8)[0].program.step.peak_bytes()
    assert 0 <= two.peak_bytes() - predicted <= 16  # the sum of the losses, and the loss that is divided


@pytest.mark.native_ledger
def test_dry_run_uses_workspaces_of_its_kernels() -> None:
    """A recomputed block keeps its tensors, not the scratch of their kernels."""
    table = WorkspaceTable.cached(threads=1)
    recording = record(workload("gpt"), workspace=table, sizes=(4,))
    target = Target(hardware.detect("cpu"), 2)
    document = {"execution": {"micro_batch": 4}, "recompute": {"kind": "selective"}, **FSDP}
    found = Rewriter(recording, target).candidate(Choice.from_document(document))
    assert isinstance(found, Candidate)
    step = dry_run(workload("gpt"), found, target, workspace=table)
    assert isinstance(step, Step)
    assert step.peak_bytes() == found.program.step.peak_bytes()


def test_dry_run_refuses_techniques_without_fake_form() -> None:
    assert "real tensors only" in str(dry("moe", {}))
    assert "DistributedDataParallel" in str(dry("gpt", {"sharding": {"states": {"kind": "ddp"}}}, 2))
    assert not dist.is_initialized()


def test_dry_run_returns_runtime_error_as_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such kernel\nand a long tale")

    monkeypatch.setattr("memtune.autotune.search.dry_runs.apply", broken)
    assert str(dry("gpt", FSDP, 2)) == "it does not run on fake tensors: RuntimeError: no such kernel"
    assert not dist.is_initialized()


def shown(report: Any) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(render(report))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_plan_exact_dry_runs_first_rows() -> None:
    report = plan(
        PlanOptions(workload=str(ZOO["tied"]), gpu_type="h100-80g", exact=True, axes=("recompute",)),
        begun=Probed(),  # type: ignore[arg-type]
    )
    exact = [each.exact_peak_bytes for each in report.front]
    assert exact[0] is not None
    assert all(peak is None for peak in exact[EXACT_ROWS:])
    assert exact[:EXACT_ROWS] == [each.peak_allocated_bytes for each in report.front[:EXACT_ROWS]]
    assert "exact peak" in shown(report)
    assert "(+0 B)" in shown(report)


def test_plan_exact_keeps_prediction_and_gives_reason_without_dry_run() -> None:
    report = plan(
        PlanOptions(workload=str(ZOO["moe"]), gpu_type="h100-80g", exact=True, axes=("recompute",)),
        begun=Probed(),  # type: ignore[arg-type]
    )
    first = report.front[0]
    assert (first.exact_peak_bytes, first.exact_reason) == (None, "the model runs on real tensors only")
    assert first.peak_allocated_bytes
    assert "no dry run of" in shown(report)
