"""Replicas of a model whose trained parameters all lie in offloaded blocks: no gradient is left for DDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from torch import Tensor, nn

import memtune

RANKS, STEPS = 2, 3


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(3)))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def batches(step: int) -> list[Tensor]:
    torch.manual_seed(100 + step)
    return [torch.randn(4, 6) for _ in range(RANKS)]


def trained(kind: str) -> dict[str, Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    settings = {"sharding": {"states": {"kind": "ddp"}}, "offload": {"states": {"kind": kind}}}
    tuned = memtune.apply(net, optimizer, {"settings": settings}, loss=loss, strict=False)
    for step in range(STEPS):
        tuned.step([batches(step)[dist.get_rank()]])
    return {name: value.clone() for name, value in tuned.state_dict()["model"].items()}


@pytest.mark.parametrize("kind", ["l2l", "optimizer_cpu"])
def test_replicas_average_gradients_of_offloaded_blocks_once(kind: str) -> None:
    wanted = model()
    optimizer = torch.optim.SGD(wanted.parameters(), 0.1, momentum=0.9)
    for step in range(STEPS):
        for batch in reversed(batches(step)):  # running statistics are rank 0's, the last
            (loss(wanted, batch) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(trained, RANKS, kind):
        for name, parameter in wanted.named_parameters():
            torch.testing.assert_close(found[name], parameter, msg=lambda text, name=name: f"{name}: {text}")
