"""DistributedDataParallel under loops with several backwards in a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from torch import Tensor, nn

from memtune.api import apply
from memtune.errors import ApplyError

WIDTH, STEPS = 8, 3


class Net(nn.Module):
    """Blocks between an input and two heads, which are outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.heads = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        one, other = self.heads(x).unbind(-1)
        return {"one": one, "other": other}


def trained(settings: dict[str, Any] | None, how: str) -> dict[str, Tensor] | str:
    """Return the weights after a few steps, over the samples of all ranks in one process if plain."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net: nn.Module = Net()
    optimizer, rank = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False), 0
    tuned = None
    if settings is not None:
        tuned = apply(net, optimizer, {"settings": settings}, loss=lambda model, x: model(x)["one"].sum())
        net, rank = tuned.model, dist.get_rank()
    for step in range(STEPS):
        torch.manual_seed(step)
        both = torch.randn(2, 2, 4, WIDTH)  # ranks, losses
        given = both.transpose(0, 1).flatten(1, 2) if tuned is None else both[rank]
        try:
            if how == "one forward":
                out = net(given[0])
                losses = [each.square().mean() for each in out.values()]
            elif how == "penalty":
                given = given.requires_grad_()
                out = net(given[0])
                (slope,) = torch.autograd.grad(out["one"].sum(), given, create_graph=True)
                losses = [slope.square().mean() + out["one"].square().mean() + out["other"].mean()]
            else:
                losses = [net(each)["one"].square().mean() + net(each)["other"].mean() for each in given]
            for loss in losses:
                loss.backward(retain_graph=loss is not losses[-1])
        except ApplyError as error:
            return error.code
        optimizer.step()
        optimizer.zero_grad()
    return tuned.state_dict()["model"] if tuned is not None else net.state_dict()


@pytest.mark.parametrize("how", ["one forward", "two forwards first"])
@pytest.mark.parametrize("states", ["none", "l2l"])
def test_ddp_averages_gradients_in_every_backward_of_a_step(how: str, states: str) -> None:
    """DDP left those of the second backward to each rank, whose weights then went apart."""
    settings = {"sharding": {"states": {"kind": "ddp"}}, "offload": {"states": {"kind": states}}}
    wanted = trained(None, how)
    for found in run_ranks(trained, 2, settings, how):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unused", [False, True])
def test_gradient_penalty_is_not_a_second_backward(unused: bool) -> None:
    """`torch.autograd.grad` reaches the outputs, but no gradient of a parameter."""
    settings = {"sharding": {"states": {"kind": "ddp", "find_unused_parameters": unused}}}
    wanted = trained(None, "penalty")
    for found in run_ranks(trained, 2, settings, "penalty"):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_ddp_refuses_a_second_backward_where_each_forward_looks_for_unused_parameters() -> None:
    settings = {"sharding": {"states": {"kind": "ddp", "find_unused_parameters": True}}}
    assert run_ranks(trained, 2, settings, "one forward") == ["MT315", "MT315"]
