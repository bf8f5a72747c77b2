"""A module whose forward another one stands in for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


class StandsAround:
    """A function in the place of a module's forward; copies of the module, and what is pickled of it, have the forward before it.

    With the function itself a copy would run the module that it was made of, and with that one's weights.

    Args:
        call: The function.
        before: The module's forward until now.
    """

    def __init__(self, call: Callable[..., Any], before: Callable[..., Any]) -> None:
        self._call, self.__wrapped__ = call, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the function."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> Any:
        return _as_it_was, (self.__wrapped__,)


def _as_it_was(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class ReplacedForward:
    """Base of what runs a module in its own way; `install` puts `forward` in the place of the module's.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._original: Callable[..., Any] = module.forward
        self._had_own = "forward" in vars(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What runs in place of the module's forward: that forward itself, unless a subclass says otherwise."""
        return self._original(*args, **kwargs)

    def install(self) -> None:
        """Put `forward` in the place of the module's."""
        self.module.forward = self.forward

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self._had_own:
            self.module.forward = self._original
        else:
            vars(self.module).pop("forward", None)

    @property
    def is_installed(self) -> bool:
        """Whether the module's forward is this one's, or one that stands around it."""
        forward = vars(self.module).get("forward")
        while forward is not None and forward != self.forward:
            around = getattr(forward, "__self__", None)
            forward = around._original if isinstance(around, ReplacedForward) else getattr(forward, "__wrapped__", None)
        return forward is not None
