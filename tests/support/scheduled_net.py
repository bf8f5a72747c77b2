"""A small module and its frozen schedule, for tests of schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memtune.activations.capture.region_capture import capture, shapes_of
from memtune.activations.schedules.scheduled_region import ScheduledRegion
from memtune.program.op_schedule import OpGraph, Schedule, build_schedule, find_schedule_error, plain_schedule
from memtune.runtime.rng_state import autocast_now

CPU = torch.device("cpu")
SCALE = 1.0


def everything_again(graph: OpGraph) -> Schedule:
    """Recompute all of forward before backward where allowed; products of other ops stay."""
    again = [op for op in range(graph.n_forward) if op not in graph.once]
    if not graph.once:
        again += range(graph.n_forward // 2)  # some for a third time
    found = build_schedule(graph, range(graph.n_forward), [*again, *range(graph.n_forward, graph.n_ops)])
    return plain_schedule(graph) if find_schedule_error(graph, found) else found


class Net(nn.Module):
    """A net with dropout, a view that is read in backward, an unused output, and settings."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(6, 8), nn.Linear(4, 3), nn.Dropout(0.5)
        self.power = 2

    def forward(self, x: Tensor, *, times: float = 1.0) -> tuple[Tensor, Tensor]:
        y = self.drop(torch.tanh(self.one(x)))
        left, right = y.chunk(2, dim=-1)
        z = left * right.sigmoid() * times * SCALE
        return self.two(z) ** self.power, z


def graph_of(net: nn.Module, *args: Any, **kwargs: Any) -> OpGraph:
    return capture(net, net.forward, shapes_of((args, kwargs)), autocast_now(), lambda i, out: True).graph


def frozen_net(again: Callable[[OpGraph], Schedule] = plain_schedule) -> tuple[Net, ScheduledRegion]:
    torch.manual_seed(0)
    net = Net()
    frozen = ScheduledRegion(net, again(graph_of(net, torch.ones(5, 6))), CPU)
    frozen.install()
    return net, frozen


def gradients(
    net: nn.Module, *args: Any, loss: Callable[..., Tensor] = lambda a, b: a.sum() + b.sum(), **kwargs: Any
) -> list[Tensor]:
    net.zero_grad()
    torch.manual_seed(1)
    loss(*net(*args, **kwargs)).backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def twin() -> Net:
    torch.manual_seed(0)
    return Net()
