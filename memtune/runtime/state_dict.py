"""State dicts with the keys, shapes and values of the plain model, whatever the config did to where the bytes live."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.held_parameter import held_chain
from memtune.runtime.tree import local


@dataclass(frozen=True)
class Held:
    """What an optimizer holds in place of a parameter of the model."""

    name: str
    """Of the model's parameter."""
    held: nn.Parameter
    """The optimizer's: the model's own, this rank's rows of it, or a host copy of either."""
    layout: nn.Parameter
    """The parameter on the device that `held` is, or is a host copy of: a DTensor where it is divided."""

    def divided(self, value: Any) -> Any:
        """A state tensor of this parameter, as the DTensor that it is this rank's part of; itself where nothing is divided.

        Raises:
            ApplyError: It belongs to a divided parameter and is of another shape, so that nothing says where it belongs.
        """
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.dim() or not isinstance(self.layout, DTensor):
            return value
        part = local(self.layout)
        if value.shape != part.shape:
            raise ApplyError(
                f"The optimizer's state of {self.name} is stored in a form that belongs to these ranks alone.",
                evidence=f"A tensor of shape {tuple(value.shape)} for {tuple(part.shape)} divided weights.",
                fix="offload: {states: {kind: optimizer_cpu, moments: float32}}", code="MT372",
            )  # fmt: skip
        return self.part(value.to(part.device))

    def part(self, rows: Tensor) -> DTensor:
        """`rows`, laid out as this rank's part of the parameter."""
        layout = self.layout
        assert isinstance(layout, DTensor)
        mesh, placements = layout.device_mesh, layout.placements
        return DTensor.from_local(rows, mesh, placements, run_check=False, shape=layout.shape, stride=layout.stride())


def held_parameters(context: Context) -> list[Held]:
    """What the optimizer holds, in the order in which its state dict counts; the name is empty where it is not the model's."""
    of: dict[int, Held] = {}
    for name, parameter in context.model.named_parameters():
        layout = parameter
        chain = held_chain(context, parameter)
        for before, held in pairwise(chain):
            layout = held if isinstance(held, DTensor) or not isinstance(before, DTensor) else before
        of[id(chain[-1])] = Held(name, chain[-1], layout)
    flat = [parameter for group in context.optimizer.param_groups for parameter in group["params"]]
    return [of.get(id(parameter)) or Held("", parameter, parameter) for parameter in flat]


def full_state_dict(context: Context) -> dict[str, Any]:
    """`{"model": ..., "optimizer": ...}` as the plain model and optimizer would give, whole on every rank.

    On several ranks all must call it: sharded tensors are gathered.
    """
    # The model first: FSDP2 then divides what a forward has left gathered.
    elsewhere = context.elsewhere
    model = {name: whole_in(context, name, value) for name, value in context.model.state_dict().items()}
    plain = context.optimizer.state_dict()
    held = held_parameters(context)
    if elsewhere is not None:
        found = {}
        for index, each in enumerate(held):
            here = {what: whole(each.divided(value)) for what, value in plain["state"].get(index, {}).items()}
            found[index] = elsewhere.states(each.name, here)
        return {"model": model, "optimizer": {**plain, "state": {index: state for index, state in found.items() if state}}}
    plain["state"] = {
        index: {name: whole(held[index].divided(value)) for name, value in state.items()}
        for index, state in plain["state"].items()
    }
    return {"model": model, "optimizer": plain}


def whole_in(context: Context, name: str, value: Any) -> Any:
    """An entry of the model's state dict, whole: gathered from all its ranks, or sent by the one that holds it."""
    return whole(value) if context.elsewhere is None else context.elsewhere.whole(name, whole(value))


def whole(value: Any) -> Any:
    """A divided tensor gathered from all its ranks; anything else as it is."""
    with torch.no_grad():
        return value.full_tensor() if isinstance(value, DTensor) else value
