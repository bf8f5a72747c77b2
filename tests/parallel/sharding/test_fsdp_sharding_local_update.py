"""Optimizers update local tensors of shards: the same numbers as on DTensors, which users see."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from support.gloo import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from memtune.api import apply


class Subclass(torch.optim.AdamW):
    """May use whole parameters."""


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2, "foreach": False}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "subclass": (Subclass, {"lr": 1e-2, "fused": True}),
}


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind, arguments = OPTIMIZERS[name]
    return kind(model.parameters(), **arguments)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    for step in range(3):
        samples = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(samples).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
    return {name: whole(each) for name, each in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def compared(name: str) -> dict[str, Any]:
    stock = model_of()
    fully_shard(stock)
    wanted = trained(stock, optimizer_of(name, stock))
    model = model_of()
    optimizer = optimizer_of(name, model)
    apply(model, optimizer, {"settings": {"sharding": {"states": {"kind": "fsdp"}}}}, strict=False)
    update, updated = torch._fused_adamw_, list[Any]()

    def seen(parameters: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        updated.extend(map(type, parameters))
        return update(parameters, *args, **kwargs)

    with mock.patch.object(torch, "_fused_adamw_", seen):
        got = trained(model, optimizer)
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "equal": all(torch.equal(got[each], wanted[each]) for each in wanted),
        "parameters": {type(each) for group in optimizer.param_groups for each in group["params"]},
        "states": {type(value) for value in states if isinstance(value, Tensor) and value.dim()},
        "left": [each for each in model.parameters() if each._local_tensor.grad is not None],
        "updated": set(updated),
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_of_shards_equals_update_of_dtensors(name: str) -> None:
    for each in run_ranks(compared, 2, name):
        assert each["equal"]
        assert each["parameters"] == each["states"] == {DTensor}
        assert not each["left"]
        assert each["updated"] == {"adamw": {Tensor}, "subclass": {DTensor}}.get(name, set())
