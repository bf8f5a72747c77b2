"""Weights that the user has changed in place on the device (clamped, averaged, drawn anew), whose values are kept elsewhere.

A change is seen by the version of the tensor, so one that goes past it (`p.data.clamp_()`) is not: `with torch.no_grad()`.
Shards and rows of ranks are not watched: what gathers and hands them on changes them as well.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from memtune.runtime.context import Context


class ChangedWeights:
    """Tells which of `parameters` have been changed since they were last noted.

    Args:
        context: Of the model, before anything is held in its parameters' place.
        parameters: On the device, each as the model holds it.
    """

    def __init__(self, context: Context, parameters: Iterable[nn.Parameter]) -> None:
        watched = () if context.represented or context.ranks > 1 else parameters
        self._versions = {each: each._version for each in watched}

    def note(self, parameter: nn.Parameter) -> None:
        """What it holds now is what is kept."""
        if parameter in self._versions:
            self._versions[parameter] = parameter._version

    def leave(self, parameters: Iterable[nn.Parameter]) -> None:
        """Somebody else says what these hold."""
        for each in parameters:
            self._versions.pop(each, None)

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the user has changed it."""
        return self._versions.get(parameter, parameter._version) != parameter._version
