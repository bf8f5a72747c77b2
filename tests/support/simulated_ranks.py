"""One rank of a group on simulated devices; each check raises in its process."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.simulated_device import devices_alone, races
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from memtune.api import apply
from memtune.runtime import HOST, tier
from memtune.testing.training import CPU, Run, build, differences, on_host

STEPS, PARTS = 3, 2
CAPACITY_BYTES = 256 << 20
"""Memory of each simulated device."""


def check_collectives() -> None:
    """Check collectives, a missing wait, messages, DDP and FSDP2 as one of two ranks."""
    rank = dist.get_rank()
    x = torch.full((4,), rank + 1.0, device=f"sim:{rank}")
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 4
    work = dist.all_reduce(x, async_op=True)
    with pytest.raises(RuntimeError, match="reads 16 bytes that simulated::allreduce on stream"):
        x + 1
    work.wait()
    assert len(races()) == 1
    assert (x + 1).tolist() == [7.0] * 4
    host = torch.ones(2)
    dist.all_reduce(host)
    assert host.tolist() == [2.0] * 2
    mine, theirs = torch.full((3,), float(rank), device=x.device), torch.empty(3, device=x.device)
    messages = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
    for message in dist.batch_isend_irecv(messages):
        message.wait()
    assert theirs.tolist() == [1.0 - rank] * 3
    rows = torch.arange(4.0, device=x.device) + 10 * rank
    dist.all_to_all_single(received := torch.empty_like(rows), rows)
    assert received.tolist() == [2.0 * rank, 2 * rank + 1, 2 * rank + 10, 2 * rank + 11]
    for wrapped in (DistributedDataParallel, fully_shard):
        _equals_the_cpu(wrapped, rank)
    torch.accelerator.synchronize()
    assert races() == []


def differences_on_ranks(
    path: str, cases: dict[str, dict[str, Any]], tolerance: float
) -> dict[str, list[str]]:
    """Return by name of a config how training on this rank's simulated device differs from the CPU's."""
    here = torch.device("sim", dist.get_rank())
    return {
        name: differences(_trained(Path(path), config, here), _trained(Path(path), config, CPU), tolerance)
        for name, config in cases.items()
    }


def _trained(path: Path, config: dict[str, Any], device: torch.device) -> Run:
    # `apply` makes the model's device the current one.
    if device != CPU:
        torch.accelerator.set_device_index(0)
    with nullcontext() if device == CPU else devices_alone():
        return _trained_here(path, config, device)


def _trained_here(path: Path, config: dict[str, Any], device: torch.device) -> Run:
    workload, model, optimizer = build(path, device)
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        with tier(HOST):
            batches = [workload.make_batch(2) for _ in range(PARTS)]
        torch.manual_seed(step)
        losses.append(on_host(torch.as_tensor(tuned.step(batches))))
    tuned.audit()
    weights = {name: on_host(value) for name, value in tuned.state_dict()["model"].items()}
    if device != CPU:
        torch.accelerator.synchronize(device)
    assert races() == []
    return Run(losses, [], weights)


def _equals_the_cpu(wrapped: object, rank: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    inputs = torch.randn(2, 3, 4)
    sum(plain(part).square().sum() for part in inputs).backward()  # type: ignore[union-attr]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(f"sim:{rank}")
    model = wrapped(model)  # type: ignore[operator]
    model(inputs[rank].to(f"sim:{rank}")).square().sum().backward()
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        gradient = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        torch.testing.assert_close(gradient.cpu(), wanted.grad / 2)
