"""State dicts with the keys, shapes and values of the plain model, whatever the config did to where the bytes live."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memtune.runtime.context import Context
from memtune.runtime.tree import local


def full_state_dict(context: Context) -> dict[str, Any]:
    """`{"model": ..., "optimizer": ...}` as the plain model and optimizer would give, whole on every rank.

    On several ranks all must call it: sharded tensors are gathered.
    """
    return {
        "model": {name: _whole(value) for name, value in context.model.state_dict().items()},
        "optimizer": _optimizer_state(context),
    }


def _optimizer_state(context: Context) -> dict[str, Any]:
    plain = context.optimizer.state_dict()
    devices = {id(host): device for device, host in context.represented.items()}
    held = [parameter for group in context.optimizer.param_groups for parameter in group["params"]]
    plain["state"] = {
        index: {name: _like(value, held[index], devices.get(id(held[index]))) for name, value in state.items()}
        for index, state in plain["state"].items()
    }
    return plain


def _like(value: Any, parameter: nn.Parameter, device_parameter: nn.Parameter | None) -> Any:
    """A state tensor of `parameter`; a host shard becomes a shard of its device parameter's layout first."""
    is_host_shard = isinstance(value, Tensor) and not hasattr(value, "full_tensor")
    if is_host_shard and device_parameter is not None and value.shape == parameter.shape:
        placements = getattr(device_parameter, "placements", None)
        if placements is not None:
            from torch.distributed.tensor import DTensor

            value = DTensor.from_local(
                value.to(local(device_parameter).device),
                device_parameter.device_mesh,  # type: ignore[attr-defined]
                placements,
                shape=device_parameter.shape,
                stride=device_parameter.stride(),
            )
    return _whole(value)


def _whole(value: Any) -> Any:
    with torch.no_grad():
        return value.full_tensor() if hasattr(value, "full_tensor") else value
