"""State dicts with the keys, shapes and values of the plain model under any config."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memtune.errors import ApplyError
from memtune.runtime import Context, local


@dataclass(frozen=True)
class ParameterEntry:
    """The optimizer's replacement of a parameter of the model: its shard or its master."""

    name: str
    """Name of the model's parameter."""
    held: nn.Parameter
    """The optimizer's parameter: the model's own, this rank's rows of it, or a host copy of either."""
    layout: nn.Parameter
    """The parameter on the device that `held` is, or is a host copy of; a DTensor if it is sharded."""

    def divided(self, value: Any) -> Any:
        """Return a state tensor of this parameter as the DTensor of which it is this rank's shard; unchanged
        if not sharded.

        Raises:
            ApplyError: The parameter is sharded and the tensor has another shape, so that its place is
                unknown.
        """
        if (
            not isinstance(value, Tensor)
            or isinstance(value, DTensor)
            or not value.dim()
            or not isinstance(self.layout, DTensor)
        ):
            return value
        part = local(self.layout)
        if value.shape != part.shape:
            raise ApplyError(
                f"The optimizer's state of {self.name} has a form that only these ranks can read.",
                evidence=f"A tensor of shape {tuple(value.shape)} for a shard of shape {tuple(part.shape)}.",
                fix="offload: {states: {kind: optimizer_cpu, moments: float32}}",
                code="MT372",
            )
        return self.part(value.to(part.device))

    def part(self, rows: Tensor) -> DTensor:
        """Return `rows` as the DTensor of which they are this rank's shard."""
        layout = self.layout
        assert isinstance(layout, DTensor)
        mesh, placements = layout.device_mesh, layout.placements
        return DTensor.from_local(
            rows, mesh, placements, run_check=False, shape=layout.shape, stride=layout.stride()
        )


def held_parameters(context: Context) -> list[ParameterEntry]:
    """Return the optimizer's parameters in the order of its state dict; '' for one not of the model."""
    of: dict[int, ParameterEntry] = {}
    for name, parameter in context.model.named_parameters():
        layout = parameter
        chain = context.placement.param_chain(parameter)
        for before, held in pairwise(chain):
            layout = held if isinstance(held, DTensor) or not isinstance(before, DTensor) else before
        of[id(chain[-1])] = ParameterEntry(name, chain[-1], layout)
    flat = [parameter for group in context.optimizer.param_groups for parameter in group["params"]]
    return [of.get(id(parameter)) or ParameterEntry("", parameter, parameter) for parameter in flat]


def full_state_dict(context: Context) -> dict[str, Any]:
    """Return `{"model": ..., "optimizer": ...}` in full on every rank; collective."""
    # The model first, because its `state_dict` makes FSDP2 reshard units that a forward has left gathered.
    remote = context.placement.remote_parameters
    model = {name: full_value(context, name, value) for name, value in context.model.state_dict().items()}
    plain = context.optimizer.state_dict()
    held = held_parameters(context)
    if remote is not None:
        found = {}
        for index, each in enumerate(held):
            here = {
                what: full_tensor(each.divided(value))
                for what, value in plain["state"].get(index, {}).items()
            }
            found[index] = remote.optimizer_state(each.name, here)
        return {
            "model": model,
            "optimizer": {**plain, "state": {index: state for index, state in found.items() if state}},
        }
    plain["state"] = {
        index: {name: full_tensor(held[index].divided(value)) for name, value in state.items()}
        for index, state in plain["state"].items()
    }
    return {"model": model, "optimizer": plain}


def full_value(context: Context, name: str, value: Any) -> Any:
    """Return an entry of the state dict in full: gathered from all its ranks, or sent by its owner."""
    remote, here = context.placement.remote_parameters, full_tensor(value)
    return here if remote is None else remote.full_value(name, here)


def full_tensor(value: Any) -> Any:
    """Return a sharded tensor gathered from all ranks, on the device of its rows; others unchanged."""
    if not isinstance(value, DTensor):
        return value
    rows, mesh = value._local_tensor, value.device_mesh
    with torch.no_grad():
        if rows.device.type == mesh.device_type:
            return value.full_tensor()
        # Offloaded ones: NCCL sends nothing from the host.
        sent = DTensor.from_local(
            rows.to(mesh.device_type),
            mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
        return sent.full_tensor().to(rows.device)
