"""Compiled steps are recorded from the graphs; what is predicted of them is what a real run holds."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.autotune.record.compiled import CompiledRecordings
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.autotune.space.search_space import build_space
from memtune.autotune.translate import translate
from memtune.compile.regions import Compiling
from memtune.errors import UsageError
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.memory.workspace import WorkspaceTable
from memtune.program.step import Phase, Recording
from memtune.runtime.memory_tiers import HOST, tier
from memtune.technique import Reason, Target
from memtune.testing.drift_check import recording_of
from memtune.testing.training import CPU, build
from memtune.workload.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

_COMPILED: dict[str, CompiledRecordings] = {}


def compiled(name: str) -> CompiledRecordings:
    if name not in _COMPILED:
        _COMPILED[name] = CompiledRecordings(
            Workload.load(ZOO[name]), workspace=WorkspaceTable.cached(threads=1)
        )
    return _COMPILED[name]


def candidate(name: str, scope: str, backend: str = "aot_eager", **axes: Any) -> Candidate | Reason:
    execution = {"micro_batch": 2, "compile": scope, "compile_backend": backend}
    rewriter = Rewriter(recording_of(ZOO[name]), Target(hardware.detect("cpu")), compiled=compiled(name))
    return rewriter.candidate(Choice.from_document({"execution": execution, **axes}))


def predicted(name: str, scope: str, **axes: Any) -> Candidate:
    found = candidate(name, scope, **axes)
    assert isinstance(found, Candidate), found
    return found


@pytest.fixture
def ledger() -> Ledger:
    if cpu_allocator.available() is not None:
        pytest.skip(f"no native ledger: {cpu_allocator.available()}")
    return Ledger.open(CPU)


def measured(found: Candidate, name: str, ledger: Ledger) -> tuple[int, int]:
    """Peak of the third step, and the bytes of the optimizer's step counters, which no recording holds."""
    torch._dynamo.reset()
    gc.collect()
    before = ledger.live_bytes()
    workload, model, optimizer = build(ZOO[name])
    settings = {"settings": found.choice.dump()}
    tuned = apply(model, optimizer, settings, strict=False, loss=workload.loss)
    ledger.track(model, optimizer)
    for _ in range(3):
        with tier(HOST):
            batch = workload.make_batch(2)
        gc.collect()
        ledger.reset_peak()
        tuned.step([batch])
    assert tuned.audit()["execution"]["graph_runs"] >= 3
    counters = sum(4 for state in optimizer.state.values() if "step" in state)
    return ledger.peak_allocated_bytes() - before, counters


@pytest.mark.parametrize(
    ("name", "scope", "axes"),
    [
        ("gpt", "blocks", {}),
        pytest.param(
            "gpt", "model", {"recompute": {"kind": "memory_budget", "budget": 0.3}}, marks=pytest.mark.slow
        ),
        pytest.param("tied", "model", {}, marks=pytest.mark.slow),
        pytest.param("cnn_bn", "blocks", {}, marks=pytest.mark.slow),
        pytest.param("lora", "blocks", {}, marks=pytest.mark.slow),
        pytest.param("hf_llama", "blocks", {}, marks=pytest.mark.slow),
        pytest.param(
            "inplace_views",
            "blocks",
            {"recompute": {"kind": "memory_budget", "budget": 0.0}},
            marks=pytest.mark.slow,
        ),
        pytest.param("gpt", "blocks", {"recompute": {"kind": "full"}}, marks=pytest.mark.slow),
        pytest.param(
            "gpt",
            "blocks",
            {"offload": {"activations": {"kind": "copy_out", "min_bytes": 0}}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt",
            "blocks",
            {"offload": {"activations": {"kind": "compressed", "min_bytes": 0}}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt", "blocks", {"offload": {"states": {"kind": "optimizer_cpu"}}}, marks=pytest.mark.slow
        ),
    ],
)
def test_compiled_recording_peak_equals_real_run(
    name: str, scope: str, axes: dict[str, Any], ledger: Ledger
) -> None:
    found = predicted(name, scope, **axes)
    peak, counters = measured(found, name, ledger)
    assert found.program.step.peak_bytes() == pytest.approx(peak - counters, rel=1e-4), (peak, counters)


def test_compiled_recordings_returns_reason_if_compilation_fails() -> None:
    found = candidate("lstm", "model")
    assert isinstance(found, Reason)
    assert "does not support RNN, GRU, or LSTM" in str(found)


def test_compiled_recording_is_independent_of_imported_transformers() -> None:
    """Models that look at their masks are watched by a dispatch mode, under which Dynamo compiles nothing."""
    pytest.importorskip("transformers")
    assert not isinstance(candidate("lora", "blocks"), Reason)


def test_compiled_model_has_no_blocks_and_equal_choices_share_recording() -> None:
    recordings = compiled("tied")
    assert recordings(Compiling("model", "aot_eager")) is recordings(Compiling("model", "aot_eager"))
    assert not predicted("tied", "model").program.step.blocks
    found = candidate("tied", "model", recompute={"kind": "full"})
    assert str(found) == "one graph holds all blocks (execution: {compile: blocks})"


def test_compiled_backward_ops_belong_to_their_blocks() -> None:
    step = predicted("gpt", "blocks").program.step
    backward = step.ops.block[step.ops.phase == Phase.BACKWARD]
    assert (
        [int((backward == block).sum()) for block in range(4)] == [int((backward == 0).sum())] * 4 != [0] * 4
    )
    assert step.saved_bytes(0) == step.saved_bytes(3) > 0


def test_frozen_compile_applies_to_every_execution() -> None:
    rewriter = Rewriter(recording_of(ZOO["tied"]), Target(hardware.detect("cpu")), compiled=compiled("tied"))
    freeze = {"compile": "blocks", "compile_backend": "aot_eager", "recompute": "none"}
    space = build_space(rewriter, 4, axes=("execution",), freeze=freeze)
    assert {(each.compile, each.compile_backend) for each in space.executions} == {("blocks", "aot_eager")}
    assert [each.micro_batch for each in space.executions] == [4, 2, 1]
    with pytest.raises(UsageError, match="MT210 There is no such execution"):
        build_space(rewriter, 4, freeze={"compile": "everything"})


ATTENTION = """
import torch
from torch import nn
from torch.nn import functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=DROP, is_causal=True)
def model(): return Net().bfloat16()
def batch(size): return torch.randn(size, 64, 32, dtype=torch.bfloat16)
def loss(model, batch): return model(batch).float().square().mean()
"""


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_attention_with_dropout_is_cudas_kernel(backend: str, tmp_path: Path) -> None:
    gpu = hardware.find("a100-80g")
    peaks = []
    for drop in ("0.1", "0.0"):
        path = tmp_path / f"drop{drop}.py"
        path.write_text(ATTENTION.replace("DROP", drop))
        make = CompiledRecordings(
            Workload.load(path), target="cuda", translate=lambda recording: translate(recording, gpu)
        )
        found = make(Compiling("model", backend))
        assert isinstance(found, Recording)
        assert any("_scaled_dot_product_flash_attention" in name for name in found.step.names)
        peaks.append(found.at(4).peak_bytes())
    assert peaks[0] == peaks[1]
