"""Gradients that a trial reports on several ranks, wherever the mechanisms keep, shard, use or free them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import SEPARATE
from support.suites.layer_major_suite import CHAIN

from memtune import hardware
from memtune.api import apply
from memtune.autotune.record_parallel.sharded_recording import ShardedRecordings
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.executors import worker
from memtune.executors.base import Trial
from memtune.executors.gradient_record import GradientRecord, largest_difference
from memtune.memory import Ledger
from memtune.ssd import offload_dir
from memtune.technique import Target
from memtune.testing.drift_check import recording_of
from memtune.testing.training import build
from memtune.workload.workload import Workload

Settings = dict[str, Any]
SSD = {"parameters": "ssd", "gradients": "ssd"}


@cache
def rewriter(path: Path, ranks: int) -> Rewriter:
    workload, plain = Workload.load(path), recording_of(path)
    return Rewriter(plain, Target(hardware.detect("cpu"), ranks, sharded=ShardedRecordings(workload, plain)))


def config_of(path: Path, ranks: int, settings: Settings) -> dict[str, Any]:
    """Return the config of the model under `settings`, with plans."""
    document = {"execution": {"micro_batch": 2, "accumulate": 2}, **settings}
    found = rewriter(path, ranks).candidate(Choice.from_document(document))
    assert isinstance(found, Candidate), found
    return {"settings": document, "plan": {slot: plan.document() for slot, plan in found.plans.items()}}


def on_rank(
    path: Path, config: dict[str, Any], folder: str, order: Sequence[int] = range(8)
) -> dict[str, GradientRecord]:
    """Return the records of the first step, over the samples in `order`."""
    os.environ[offload_dir.VARIABLE] = folder
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    trial = Trial(number=0, workload=str(path), config=config, gradient_steps=1, ranks=ranks)
    place = worker._Rank(trial, rank, ranks, rank, sys.stdout.fileno())
    workload, model, _ = build(path)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # ranks draw other numbers than one process
    shapes = {name: each.shape for name, each in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    worker._reserve_first_hook(optimizer)
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    measured = worker._Measurements()
    worker._digest_gradients(place, tuned, shapes, Ledger.open(place.device, budget_bytes=None), measured)
    torch.manual_seed(0)
    drawn = [workload.make_batch(2) for _ in range(8)]
    samples = [drawn[index] for index in order]
    per_rank = len(samples) // ranks
    tuned.step(samples[rank * per_rank : (rank + 1) * per_rank])
    return measured.gradients[0]


def states(sharding: str, kind: str, **knobs: Any) -> Settings:
    return {"sharding": {"states": {"kind": sharding}}, "offload": {"states": {"kind": kind, **knobs}}}


def parallel(kind: str, sharding: str = "none") -> Settings:
    return {"sharding": {"parallel": {"kind": kind, "degree": 2}, "states": {"kind": sharding}}}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, states("zero1", "zero_offload", bucket_mib=0.1)),
        (2, states("fsdp", "zero_infinity", **SSD)),
        (2, {"offload": {"states": {"kind": "mobius", "stages": 4}}}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, states("zero2", "optimizer_cpu", update="native", trigger="per_layer")),
                (2, states("zero2", "lohan")),
                (2, states("fsdp", "zero_offload", bucket_mib=0.1)),
                (2, states("fsdp", "stronghold")),
                (2, states("fsdp", "patrickstar")),
                (2, states("fsdp", "elixir")),
                (2, states("fsdp", "angel_ptm")),
                (2, states("fsdp", "smart_infinity")),
                (2, {"offload": {"states": {"kind": "harmony", "parallelism": "pipeline"}}}),
                (2, parallel("pipeline")),
                (2, parallel("tensor")),
                (2, parallel("sequence_parallel")),
                (2, parallel("rtp")),
                (4, parallel("tensor")),
                (4, parallel("tensor", "zero1")),
                (4, parallel("tensor", "fsdp")),
                (4, parallel("pipeline", "ddp")),
                (4, parallel("pipeline", "zero1")),
            )
        ),
    ],
    ids=str,
)
def test_worker_reports_full_gradients(
    ranks: int, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of every gradient, once, by all ranks alike, and equal to the plain model's."""
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    path = SEPARATE if "parallel" in settings.get("sharding", {}) else CHAIN
    config = config_of(path, ranks, settings)
    found = run_ranks(on_rank, ranks, path, config, str(tmp_path))
    plain = run_ranks(on_rank, 0, path, {"settings": {}}, str(tmp_path))[0]
    assert all(each == found[0] for each in found)
    assert largest_difference(found[0], plain)[0] < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"offload": {"states": {"kind": "mobius", "stages": 4}}},
        pytest.param(
            {"offload": {"states": {"kind": "harmony", "parallelism": "pipeline"}}}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_rotated_micro_batches_add_up_as_one_rank_adds_them(settings: Settings, tmp_path: Path) -> None:
    """The sum is that of one process, to the bit, over each rank's first sample, then the second ones; DDP
    adds up each rank's own samples first.
    """
    found = run_ranks(on_rank, 2, CHAIN, config_of(CHAIN, 2, settings), str(tmp_path))
    in_turn = tuple(index + rank * 4 for index in range(4) for rank in range(2))
    wanted, other = (
        run_ranks(on_rank, 0, CHAIN, {"settings": {}}, str(tmp_path), order)[0]
        for order in (in_turn, range(8))
    )
    assert found[0] == found[1]
    hashes = {name: each.sha256 for name, each in found[0].items()}
    assert hashes == {name: each.sha256 for name, each in wanted.items()}
    assert hashes != {name: each.sha256 for name, each in other.items()}
