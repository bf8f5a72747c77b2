"""How a gradient gets into a parameter, and who else wants to see it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def is_watched(parameters: Iterable[Tensor]) -> bool:
    """Whether somebody may wait for gradients one by one: DDP's own hooks cannot be seen (Rule 4 of `frozen`)."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return True
    return any(map(is_hooked, parameters))


def is_hooked(parameter: Tensor) -> bool:
    """Whether autograd calls somebody with the parameter's gradient, or when it is in place."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def is_accumulated(edge: Any) -> bool:
    """Whether the engine runs this parameter's own node, so that the gradient goes into `parameter.grad`."""
    try:
        return bool(torch._C._will_engine_execute_node(edge))
    except RuntimeError:  # asked for in `autograd.grad`: it is returned to the caller
        return False


def put_in_place(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate `gradient` as autograd's own node does: not into what wants none any more."""
    if not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
