"""What an optimizer holds in the place of a parameter: on the host, on SSD.

Who goes through `optimizer.param_groups`, as trainers do to clip by norm, finds there the gradients that a step would use,
wherever they are: the parameter's own on the device, or, once that has left it, the sum that is held.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

from torch import Tensor, nn

from memtune.runtime.context import Context

_GRAD: Any = Tensor.grad


class HeldParameter(nn.Parameter):
    """Shows the gradient of the parameter that it stands for while it has none of its own; a copy stands for nothing."""

    _stands_for: nn.Parameter | None = None

    @property
    def grad(self) -> Tensor | None:
        """Its own, or that of what it stands for."""
        own: Tensor | None = _GRAD.__get__(self)
        return own if own is not None or self._stands_for is None else self._stands_for.grad

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _GRAD.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """A pickled one stands for nothing either: the model's parameter may have no memory now."""
        stands_for = vars(self).pop("_stands_for", None)
        try:
            return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        finally:
            self._stands_for = stands_for

    @property
    def is_replaced(self) -> bool:
        """There is a sum that is held, and another gradient on the device: somebody has put it there."""
        return _GRAD.__get__(self) is not None and self._stands_for is not None and self._stands_for.grad is not None


def held_for(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """A parameter with `value` that an optimizer holds in the place of `parameter`."""
    held: nn.Parameter = HeldParameter(value, requires_grad=parameter.requires_grad)
    held._stands_for = parameter  # type: ignore[attr-defined]
    return held


def held_chain(context: Context, parameter: nn.Parameter) -> list[nn.Parameter]:
    """The model's `parameter`, what is held in its place, and what in that one's; the optimizer has the last."""
    chain = [parameter]
    while (held := context.represented.get(chain[-1])) is not None:
        chain.append(held)
    return chain


def held_in_place(context: Context, parameter: nn.Parameter) -> nn.Parameter:
    """What the optimizer holds in the place of the model's `parameter`, itself where that is so."""
    return held_chain(context, parameter)[-1]


def model_order(context: Context) -> dict[nn.Parameter, int]:
    """Places of the model's parameters, and of all that is held in place of each, in the order that predictions have.

    An optimizer's groups may have another one, as those of what decays and what does not.
    """
    return {each: place for place, mine in enumerate(context.model.parameters()) for each in held_chain(context, mine)}
