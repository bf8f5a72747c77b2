"""The parameters and buffers of a module, found at every step: several times as fast as by their names."""

from __future__ import annotations

from torch import Tensor, nn


def members_of(module: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Parameters and buffers of `module` and of all in it, each once."""
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    seen, left = {id(module)}, [module]
    while left:
        each = left.pop()
        parameters.update((id(tensor), tensor) for tensor in each._parameters.values() if tensor is not None)
        buffers.update((id(tensor), tensor) for tensor in each._buffers.values() if tensor is not None)
        inner = [child for child in each._modules.values() if child is not None and id(child) not in seen]
        seen.update(map(id, inner))
        left += inner
    return list(parameters.values()), list(buffers.values())
