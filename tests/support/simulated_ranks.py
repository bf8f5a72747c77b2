"""One rank of a group on simulated devices; each check raises in its process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from memtune.testing.simulated_device import races, start


def run(rank: int, store: str) -> None:
    """Check collectives, a missing wait, DDP and FSDP2 as one of two ranks."""
    start(2)
    torch.accelerator.set_device_index(rank)
    dist.init_process_group("cpu:gloo,sim:simulated", init_method=f"file://{store}", rank=rank, world_size=2)
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
    for wrapped in (DistributedDataParallel, fully_shard):
        _equals_the_cpu(wrapped, rank)
    torch.accelerator.synchronize()
    assert races() == []
    dist.destroy_process_group()


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
