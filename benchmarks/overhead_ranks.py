"""The group `ranks` of `overhead.py`: sharding and parallelism against PyTorch's own, on two gloo ranks.

Both kinds train in each process, in rotation; times are CPU seconds of rank 0's process, with gloo's threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from overhead import Row, rows_of
from overhead_cases import BATCH, Case, Step
from overhead_clock import counts_of, measure
from support.gloo import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from memtune.autotune.record.recorder import record
from memtune.autotune.record_parallel.sharded_recording import ShardedRecordings
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.technique import Target

RANKS, PARTS, DEADLINE_S = 2, 4, 1500
COMPARED = [
    ("ddp", "torch DDP", "plain"),
    ("zero1", "torch ZeroRedundancyOptimizer", "plain"),
    ("zero2", "torch FSDP2, no reshard", "plain"),
    ("zero3", "torch FSDP2", "plain"),
    ("fsdp", "torch FSDP2", "plain"),
    ("fsdp, no reshard", "torch FSDP2, no reshard", "plain"),
    ("tensor, MLPs", "torch parallelize_module, MLPs", "plain"),
    ("pipeline, 4 micro-batches", "torch Schedule1F1B, 4 micro-batches", "plain, 4 micro-batches"),
]


def on_ranks(rounds: int) -> list[Row]:
    """Return the rows of the group."""
    tensor, pipeline = _planned("tensor", 1, layers="mlp"), _planned("pipeline", PARTS // RANKS)
    times, counts, blocks = run_ranks(_measured, RANKS, rounds, tensor, pipeline, deadline_s=DEADLINE_S)[0]
    return rows_of("ranks", times, counts, COMPARED, blocks)


def _measured(rounds: int, tensor: dict[str, Any], pipeline: dict[str, Any]) -> tuple[Any, Any, int]:
    case = Case("gpt")
    ways: dict[str, Step] = {
        "plain": case.step(*case.with_optimizer()),
        "plain, 4 micro-batches": _in_parts(case),
        "torch DDP": _ddp(case),
        "torch ZeroRedundancyOptimizer": _zero_redundancy(case),
        "torch FSDP2": _fsdp(case, reshard=True),
        "torch FSDP2, no reshard": _fsdp(case, reshard=False),
        "torch parallelize_module, MLPs": _parallelized(case),
        "torch Schedule1F1B, 4 micro-batches": _pipelined(case),
        "ddp": case.tuned("sharding.states", "ddp", updates=True),
        "zero1": case.tuned("sharding.states", "zero1", updates=True),
        "zero2": case.tuned("sharding.states", "zero2", updates=True),
        "zero3": case.tuned("sharding.states", "zero3", updates=True),
        "fsdp": case.tuned("sharding.states", "fsdp", updates=True),
        "fsdp, no reshard": case.tuned("sharding.states", "fsdp", updates=True, reshard_after_forward=False),
        "tensor, MLPs": _tuned_tensor(case, tensor),
        "pipeline, 4 micro-batches": _tuned_pipeline(case, pipeline),
    }
    times = measure(ways, rounds, steps=2)
    return times, {name: counts_of(way) for name, way in ways.items()}, len(case.blocks)


def _updating(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    loss, batch = case.source.loss, case.batch

    def run() -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _ddp(case: Case) -> Step:
    model, optimizer = case.with_optimizer()
    return _updating(case, DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer)


def _zero_redundancy(case: Case) -> Step:
    model = DistributedDataParallel(case.build(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3, fused=True
    )
    return _updating(case, model, optimizer)


def _fsdp(case: Case, *, reshard: bool) -> Step:
    model = case.build()
    for name in case.blocks:
        fully_shard(model.get_submodule(name), reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return _updating(case, model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def _parallelized(case: Case) -> Step:
    model, mesh = case.build(), init_device_mesh("cpu", (RANKS,))
    for name in case.blocks:
        parallelize_module(
            model.get_submodule(name), mesh, {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        )
    # Fused updates do not mix DTensors and tensors.
    return _updating(case, model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))


def _in_parts(case: Case) -> Step:
    model, optimizer = case.with_optimizer()
    loss, batch = case.source.loss, case.batch

    def run() -> None:
        for _ in range(PARTS):
            (loss(model, batch) / PARTS).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


class _First(nn.Module):
    """The first stage of the GPT."""

    def __init__(self, model: Any, blocks: int) -> None:
        super().__init__()
        self.wte, self.wpe, self.h = model.wte, model.wpe, model.h[:blocks]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return x  # type: ignore[no-any-return]


class _Last(nn.Module):
    """The last stage of the GPT."""

    def __init__(self, model: Any, blocks: int) -> None:
        super().__init__()
        self.h, self.ln_f, self.head = model.h[blocks:], model.ln_f, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))  # type: ignore[no-any-return]


def _pipelined(case: Case) -> Step:
    rank, half = dist.get_rank(), len(case.blocks) // 2
    kinds: tuple[Callable[..., nn.Module], ...] = (_First, _Last)
    module = kinds[rank](case.build(), half)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))

    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = Schedule1F1B(stage, PARTS, loss_fn=loss)
    tokens, targets = (torch.cat([each] * PARTS) for each in case.batch)

    def run() -> None:
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _tuned_pipeline(case: Case, document: dict[str, Any]) -> Step:
    tuned = case.applied(document, loss=case.source.loss)
    # Every rank of a pipeline runs the micro-batches of all of them.
    return lambda: tuned.step([case.batch] * (PARTS // RANKS))


def _tuned_tensor(case: Case, document: dict[str, Any]) -> Step:
    tuned = case.applied(document)
    return _updating(case, tuned.model, tuned.optimizer)


def _planned(kind: str, accumulate: int, **knobs: Any) -> dict[str, Any]:
    """Return a config with the plan of a technique of `sharding.parallel`."""
    case = Case("gpt")
    settings = {
        "execution": {"micro_batch": BATCH, "accumulate": accumulate},
        "sharding": {"parallel": {"kind": kind, **knobs}},
    }
    plain = record(case.workload)
    target = Target(case.target.hardware, RANKS, sharded=ShardedRecordings(case.workload, plain))
    found = Rewriter(plain, target).candidate(Choice.from_document(settings))
    assert isinstance(found, Candidate), found
    return {"settings": settings, "plan": {slot: plan.document() for slot, plan in found.plans.items()}}
