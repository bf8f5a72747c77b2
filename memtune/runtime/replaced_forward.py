"""A module whose forward another one stands in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


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
