"""Start of the parameters that offload keeps off the device: their values go straight to the host or SSD.

So a model whose weights exceed the device can start. `apply` materializes a deferred model's parameters one
by one on their tier (`Effects.parameters_on`), and takes those of a model on the CPU as they are. Until the
technique takes them over (`offloaded_parameter`) they show that memory, as between two uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.offload.core.fsdp_shards import GatheredBlocks
from memtune.offload.core.offloaded_parameter import set_data
from memtune.runtime import DEVICE, HOST, SSD, Context, host_like, mark, memory_of, tier_of, transfer
from memtune.ssd import ssd_tensors

AtRest = dict[str, Callable[[Tensor], Tensor]]
"""By parameter name, a function that returns memory off the device with the values of a host tensor."""


def rest_off_device(context: Context) -> AtRest:
    """Return how the parameters that `offload.states` keeps off the device are materialized."""
    is_on_ssd = context.placement.offload.parameters_on == SSD
    put: Callable[[str, Tensor], Tensor] = _on_ssd if is_on_ssd else partial(_on_host, context.device)
    return {name: partial(put, name) for name in context.off_device()}


def _on_host(device: torch.device, name: str, values: Tensor) -> Tensor:
    locked = transfer.pins(device)
    # As it is only with a storage of its own: a view would hold all of a larger one.
    if tier_of(values) == HOST and not locked and values.untyped_storage().nbytes() == values.nbytes:
        return values
    host = host_like(values, locked=locked).copy_(values)
    mark(host, HOST)
    return host


def _on_ssd(name: str, host: Tensor) -> Tensor:
    return ssd_tensors.stored(host, f"the weight {name}")


@torch.no_grad()
def move_model(context: Context, at_rest: AtRest) -> None:
    """Move the model of `context` to its device, parameters in `at_rest` to their tier; one tensor at a time.

    Objects remain, as with `Module.to`. `undo` gets the reverse.
    """
    device, moved = context.device, dict[Tensor, Tensor]()

    def on_device(x: Tensor) -> Tensor:
        # Both: on CPU all tiers are of one device, and the tier alone tells them apart.
        there = tier_of(x) == DEVICE and x.device == device
        return x if there else torch.empty_like(x, device=device).copy_(x)

    for name, parameter in context.model.named_parameters():
        if parameter in context.placement.at_rest:
            continue
        own = memory_of(parameter)
        new = at_rest[name](own) if name in at_rest else on_device(own)
        if name in at_rest:
            context.placement.at_rest.add(parameter)
        if new is not own:
            # One by one, as parameters move: a failure in the middle moves back those that have moved.
            context.undo.callback(_move_back, parameter, own.device)
            set_data(parameter, new)
        # Moments have the parameter's shape and follow it; step counters stay where they are.
        state = context.optimizer.state.get(parameter, {})
        if name not in at_rest:
            same = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == parameter.shape}
            state.update({key: on_device(value) for key, value in same.items()})
            if parameter.grad is not None:
                parameter.grad = on_device(parameter.grad)
    for module in context.model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                # A buffer of several modules remains one tensor.
                if buffer not in moved:
                    moved[buffer] = on_device(buffer)
                module._buffers[key] = moved[buffer]


def _move_back(parameter: nn.Parameter, device: torch.device) -> None:
    with torch.no_grad():
        set_data(parameter, memory_of(parameter).to(device, copy=True))


@torch.no_grad()
def move_to_device(context: Context, parameters: Iterable[nn.Parameter]) -> None:
    """Move those of `parameters` that are at rest to the device, where they stay."""
    mine = [each for each in parameters if each in context.placement.at_rest]
    gathered = GatheredBlocks(context) if any(isinstance(each, DTensor) for each in mine) else None
    for each in mine:
        context.placement.at_rest.discard(each)
        if gathered is not None:
            gathered.put_rows(each, gathered.rows_of(each).to(context.device))
        else:
            set_data(each, memory_of(each).to(context.device))
