"""Compiled blocks on several ranks.

Gathers and reductions stay outside of the graphs, results and peaks are the eager run's.
"""

from __future__ import annotations

import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.autotune.record.compiled import CompiledRecordings
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.memory.workspace import WorkspaceTable
from memtune.runtime.memory_tiers import HOST, tier
from memtune.technique import Reason, Target
from memtune.testing.drift_check import recording_of
from memtune.testing.training import build
from memtune.workload.workload import Workload

RANKS = 2
SPARE_BYTES = 24
"""As in `sharded_suite`."""
BRIEF: dict[str, dict[str, Any]] = {"blocks · fsdp": {"sharding": {"states": {"kind": "fsdp"}}}}
LONG: dict[str, dict[str, Any]] = {
    "model · zero1": {"sharding": {"states": {"kind": "zero1"}}},
    "blocks · zero2": {"sharding": {"states": {"kind": "zero2"}}, "execution": {"accumulate": 2}},
    "blocks · fsdp of two blocks": {"sharding": {"states": {"kind": "fsdp", "blocks_per_unit": 2}}},
    "blocks · full, fsdp": {"recompute": {"kind": "full"}, "sharding": {"states": {"kind": "fsdp"}}},
    "blocks · copy_out, ddp": {
        "offload": {"activations": {"kind": "copy_out"}},
        "sharding": {"states": {"kind": "ddp"}},
    },
    "blocks · optimizer_cpu, zero3": {
        "offload": {"states": {"kind": "optimizer_cpu"}},
        "sharding": {"states": {"kind": "zero3"}},
    },
}


def settings_of(name: str, axes: dict[str, Any], *, compiled: bool) -> dict[str, Any]:
    how = {"compile": name.partition(" ")[0], "compile_backend": "aot_eager"} if compiled else {}
    return {**axes, "execution": {"micro_batch": 2, **axes.get("execution", {}), **how}}


def trained(
    path: str, configs: dict[str, dict[str, Any]]
) -> dict[str, tuple[list[float], int, dict[str, torch.Tensor]]]:
    """Return a rank's losses, the peak of the steps after the second, and the full weights after the last."""
    ledger, found = Ledger.open("cpu"), {}
    for name, settings in configs.items():
        gc.collect()
        empty = ledger.live_bytes()
        workload, model, optimizer = build(Path(path))
        tuned = apply(model, optimizer, {"settings": settings}, loss=workload.loss, strict=False)
        losses, peak = [], 0
        for step in range(5):
            with tier(HOST):
                batches = [workload.make_batch(2) for _ in range(settings["execution"].get("accumulate", 1))]
            ledger.reset_peak()
            losses.append(float(tuned.step(batches)))
            peak = max(peak, ledger.peak_allocated_bytes() - empty) if step > 1 else 0
        found[name] = losses, peak, tuned.state_dict()["model"]
        assert bool(tuned.audit().get("execution", {}).get("graphs")) == ("compile" in settings["execution"])
        del model, optimizer, tuned, workload
    return found


@cache
def rewriter() -> Rewriter:
    compiled = CompiledRecordings(Workload.load(ZOO["gpt"]), workspace=WorkspaceTable.cached(threads=1))
    return Rewriter(recording_of(ZOO["gpt"]), Target(hardware.detect("cpu"), RANKS), compiled=compiled)


def predicted_bytes(settings: dict[str, Any]) -> int:
    found = rewriter().candidate(Choice.from_document(settings))
    assert isinstance(found, Candidate), found
    return found.program.step.peak_bytes()


def check(cases: dict[str, dict[str, Any]]) -> None:
    """Check that compiled runs equal eager ones bitwise, and that their peaks equal the predictions."""
    if cpu_allocator.available() is not None:
        pytest.skip(f"no native ledger here: {cpu_allocator.available()}")
    configs = {
        f"{name} {kind}": settings_of(name, axes, compiled=kind == "compiled")
        for name, axes in cases.items()
        # The compiled run comes first, while nothing of another run is live in its processes.
        for kind in ("compiled", "eager")
    }
    for rank in run_ranks(trained, RANKS, str(ZOO["gpt"]), configs, deadline_s=300):
        for name in cases:
            (losses, _, weights), (wanted, _, plain) = rank[f"{name} compiled"], rank[f"{name} eager"]
            assert losses == wanted, name
            assert all(torch.equal(weights[key], plain[key]) for key in plain), name
    for name in cases:
        peak, wanted_bytes = rank[f"{name} compiled"][1], predicted_bytes(configs[f"{name} compiled"])
        assert wanted_bytes <= peak <= wanted_bytes + SPARE_BYTES, (name, peak, wanted_bytes)


@pytest.mark.usefixtures("one_thread")
def test_compiled_ranks_equal_eager_ranks_and_prediction() -> None:
    check(BRIEF)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", LONG)
def test_compiled_ranks_with_other_techniques(name: str) -> None:
    check({name: LONG[name]})


def refused(path: str) -> str:
    _, model, optimizer = build(Path(path))
    execution = {"compile": "model", "compile_backend": "aot_eager"}
    try:
        apply(
            model,
            optimizer,
            {"settings": {"execution": execution, "sharding": {"states": {"kind": "fsdp"}}}},
            strict=False,
        )
    except ApplyError as error:
        return f"{error.code} {error.what}{' left a trace' if 'forward' in vars(model) else ''}"
    return ""


@pytest.mark.slow
def test_compile_rejects_fsdp_units_in_one_graph() -> None:
    fits = rewriter().candidate(
        Choice.from_document(settings_of("model", BRIEF["blocks · fsdp"], compiled=True))
    )
    assert isinstance(fits, Reason)
    assert "one graph holds all blocks" in fits.text
    said = set(run_ranks(refused, RANKS, str(ZOO["gpt"])))
    assert said == {f"MT315 sharding.states: {{kind: fsdp}} cannot be used in this config: {fits.text}."}
