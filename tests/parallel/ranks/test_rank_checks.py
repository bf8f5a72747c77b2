"""Preconditions on several ranks before a model is sharded over them, and the message of each when one of
them fails.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.ranks.data_parallel_steps import TiedNet, loss, optimizer_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from memtune.api import apply
from memtune.errors import ApplyError, MemtuneError, WorkloadError
from memtune.parallel.ranks import error_propagation
from memtune.parallel.ranks.error_propagation import RankFailed
from memtune.parallel.ranks.rank_checks import require_backend

DDP: dict[str, Any] = {"sharding": {"states": {"kind": "ddp"}}}
FSDP: dict[str, Any] = {"sharding": {"states": {"kind": "fsdp"}}}
TOKENS = torch.ones(2, 5, dtype=torch.long)


def refused(model: nn.Module, settings: dict[str, Any]) -> str:
    before = [(name, type(module)) for name, module in model.named_modules()]
    try:
        apply(model, optimizer_of(model), {"settings": settings}, loss=loss, strict=False)
    except ApplyError as error:
        assert [(name, type(module)) for name, module in model.named_modules()] == before
        return str(error)
    return "no error"


def everything() -> dict[str, str]:
    torch.manual_seed(0)
    sharded = TiedNet()
    fully_shard(sharded.h[0])
    mine = {**FSDP, "recompute": {"kind": "full"}} if dist.get_rank() else FSDP
    wider = TiedNet()
    if dist.get_rank():
        wider.extra = nn.Linear(2, 2)  # type: ignore[assignment]
    return {
        "ddp": refused(DistributedDataParallel(TiedNet()), FSDP),
        "fsdp": refused(sharded, FSDP),
        "config": refused(TiedNet(), mine),
        "model": refused(wider, FSDP),
    }


def one_fails(states: str, how: str) -> str:
    """Return this rank's message when rank 1 fails in the middle of its second step."""
    torch.manual_seed(0)
    if how == "killed":  # it leaves no message to wait for
        error_propagation._TIMEOUT = timedelta(seconds=0.5)
    model = TiedNet()
    steps: list[int] = []

    def fails(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        if len(steps) == 1 and dist.get_rank() == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("there are no more samples")
        try:
            return loss(model, tokens)
        except RuntimeError as error:  # as a workload's loss does, around the forward's collectives
            raise WorkloadError("loss() failed") from error

    tuned = apply(
        model,
        optimizer_of(model),
        {"settings": {"sharding": {"states": {"kind": states}}}},
        loss=fails,
        strict=False,
    )
    try:
        for step in range(2):
            tuned.step([TOKENS])
            steps.append(step)
    except RankFailed as error:
        return str(error)
    return "no error"


def one_refuses() -> str:
    """Return this rank's message when rank 1 alone raises, after all of them have raised something else."""
    everyone = refused(TiedNet(), {**FSDP, "recompute": {"kind": "full"}} if dist.get_rank() else FSDP)
    assert "MT379" in everyone
    torch.manual_seed(0)
    model = TiedNet()
    optimizer = (
        torch.optim.RMSprop(model.parameters()) if dist.get_rank() else torch.optim.AdamW(model.parameters())
    )
    settings = {
        "sharding": {"states": {"kind": "ddp"}},
        "offload": {"states": {"kind": "optimizer_cpu", "update": "native"}},
    }
    try:
        apply(model, optimizer, {"settings": settings}, loss=loss, strict=False).step([TOKENS])
    except (ApplyError, RankFailed) as error:
        return str(error)
    return "no error"


def irreducible() -> list[str]:
    """Return the messages for layers that gloo's ranks cannot train."""
    norm = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    rows = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    return [refused(model, DDP) for model in (norm, rows)]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, str]]:
    return run_ranks(everything, 2, deadline_s=300)


@pytest.mark.parametrize(
    ("name", "by"), [("ddp", "The model is wrapped by DistributedDataParallel"), ("fsdp", "h.0 is wrapped")]
)
def test_require_plain_refuses_wrapped_model(ranks: list[dict[str, str]], name: str, by: str) -> None:
    for rank in ranks:
        assert "MT376" in rank[name]
        assert by in rank[name]


def test_ranks_with_different_configs_all_raise(ranks: list[dict[str, str]]) -> None:
    assert ranks[0]["config"] == ranks[1]["config"]
    assert "MT379 1 of 2 ranks have another config or model than rank 0" in ranks[0]["config"]
    assert '"full"' in ranks[0]["config"]


def test_ranks_with_different_models_all_raise(ranks: list[dict[str, str]]) -> None:
    assert ranks[0]["model"] == ranks[1]["model"]
    assert "MT379" in ranks[0]["model"]
    assert "model: sha256" in ranks[0]["model"]


@pytest.mark.parametrize(
    "states",
    ["fsdp", pytest.param("ddp", marks=pytest.mark.slow), pytest.param("zero2", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("how", "message"),
    [("raises", "Rank 1 failed first: ValueError: there are no more"), ("killed", "no message")],
)
def test_all_ranks_report_first_failure(states: str, how: str, message: str) -> None:
    first, failed, third = run_ranks(one_fails, 3, states, how, deadline_s=60, may_fail=True)
    assert failed is None
    for rank in (first, third):
        assert "MT377" in rank
        assert message in rank


def test_layers_that_ranks_cannot_reduce_are_refused() -> None:
    for norm, rows in run_ranks(irreducible, 2, deadline_s=60):
        assert norm.startswith("MT329 1 is a SyncBatchNorm, which torch runs on accelerators only.")
        assert rows.startswith("MT329 The gradient of 0.weight is sparse")


def test_all_ranks_report_refusal_of_one_rank() -> None:
    other, refusal = run_ranks(one_refuses, 2, deadline_s=60, may_fail=True)
    assert "RMSprop" in refusal
    assert other.startswith("MT377")
    assert f"Rank 1 failed first: {refusal}" in other


def test_require_backend_refuses_group_of_another_device() -> None:
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(MemtuneError, match=r"MT378(.|\n)*cpu"):
            require_backend(torch.device("cpu"))
    finally:
        dist.destroy_process_group()
