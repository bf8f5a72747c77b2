"""Parameters that an optimizer has instead of the model's: copies on the host or on SSD.

A trainer that walks `optimizer.param_groups`, for example to clip by norm, finds there the gradients that the
step will use: the model parameter's own while it is on the device, and the host sum once it is offloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from memtune.errors import ApplyError
from memtune.runtime import HOST, Context, local, mark, transfer

_GRAD: Any = Tensor.grad
own_grad: Callable[[nn.Parameter], Tensor | None] = _GRAD.__get__
"""Return the gradient of a parameter itself; of an `OptimizerParameter` not that of the one it replaces."""
set_own_grad: Callable[[nn.Parameter, Tensor | None], None] = _GRAD.__set__
"""Set `own_grad`."""


class OptimizerParameter(nn.Parameter):
    """An optimizer's parameter that shows the gradient of the model's parameter while it has none of its own.

    Copies of it do not show another parameter's gradient.
    """

    _replaces: nn.Parameter | None = None
    # torch's hash is a Python function, and every step looks up each parameter several times.
    __hash__ = object.__hash__

    @property
    def grad(self) -> Tensor | None:
        """Its own gradient, or that of the parameter it replaces."""
        own = own_grad(self)
        # Own gradient first: after an offload it is the sum, and the model's parameter may already have a
        # newer one.
        return own if own is not None or self._replaces is None else self._replaces.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        shown = self._shown_parameter
        if shown is None:
            set_own_grad(self, gradient)
        else:
            shown.grad = gradient  # what the user replaces or clears is the gradient that is shown

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def _shown_parameter(self) -> nn.Parameter | None:
        """The parameter it replaces, if it shows that one's gradient."""
        replaced = self._replaces
        shows = own_grad(self) is None and replaced is not None and replaced.grad is not None
        return replaced if shows else None

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle without the model's parameter, whose memory may be freed now."""
        # A deep copy or a pickle would read the model's weight through this reference.
        replaces = vars(self).pop("_replaces", None)
        try:
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        finally:
            self._replaces = replaces

    @property
    def is_replaced(self) -> bool:
        """True if the model's parameter has a new gradient although the offloaded sum exists."""
        # Only code outside memtune, such as an assignment to `.grad`, causes this.
        return (
            own_grad(self) is not None and self._replaces is not None and own_grad(self._replaces) is not None
        )


def optimizer_parameter(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Return a parameter with `value` for the optimizer to have instead of `parameter`."""
    held: nn.Parameter = OptimizerParameter(value, requires_grad=parameter.requires_grad)
    held._replaces = parameter  # type: ignore[attr-defined]
    return held


def model_order(context: Context) -> dict[nn.Parameter, int]:
    """Return the position of each model parameter and its replacements in the order of predictions."""
    # An optimizer's groups may have another order, for example where weight decay differs.
    return {
        each: place
        for place, mine in enumerate(context.model.parameters())
        for each in context.placement.param_chain(mine)
    }


def changed_type_error(now: Tensor, dtype: torch.dtype, shape: torch.Size) -> ApplyError:
    """Return the error of a weight of `dtype` and `shape` that user code has made one like `now`."""
    return ApplyError(
        f"A weight of shape {tuple(shape)} and {dtype} was changed to {tuple(now.shape)} and {now.dtype}"
        " after memtune.apply.",
        evidence="Its memory, and the plan, are those of the type that it had.",
        fix="model.to(dtype), model.half() and the like before memtune.apply",
        code="MT364",
    )


# Copies on the host of what a device's optimizer works on: weights, masters, state.
def to_host_now(tensor: Tensor) -> Tensor:
    """Return a complete host copy of `tensor`; waits for the copy."""
    host: Tensor = torch.ops.memtune.to_host(tensor.detach())
    transfer.finish(host)
    return host


def state_to_host(value: Any) -> Any:
    """Return a host copy of a state tensor, or `value` itself if it is no tensor."""
    if not isinstance(value, Tensor):
        return value
    host = to_host_now(local(value))
    mark(host, HOST)
    return host
