"""One gradient that stays on the device until the optimizer's step and tells whether somebody changed gradients meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from memtune.runtime.gathered_rows import count_changes


class Witness:
    """The gradient of `parameter`: whoever scales gradients (clipping by norm, a loss scaler) changes it as well.

    Where the parameter took no part in a step (a layer that was left out, an expert that got nothing) zeros stand in for its
    gradient, and are taken away before the optimizer sees them.

    Args:
        parameter: Whose gradient nobody moves.
        stands_in: Without it, a step in which the parameter took no part counts as one with changed gradients.
    """

    def __init__(self, parameter: nn.Parameter, *, stands_in: bool = True) -> None:
        self.parameter, self._may_stand_in = parameter, stands_in
        self._version: int | None = None
        self._zeros: Tensor | None = None

    def landed(self) -> None:
        """Autograd has put a gradient in place, or added one to what stood in for it."""
        self._zeros = None

    @property
    def stands_in(self) -> bool:
        """Whether zeros are there in the place of a gradient."""
        return self._zeros is not None

    @torch.no_grad()
    def note(self) -> None:
        """A backward has ended: what changes the gradient from here on is noticed."""
        if self.parameter.grad is None and self._may_stand_in:
            self._zeros = self.parameter.grad = torch.zeros_like(self.parameter)
        gradient = self.parameter.grad
        if gradient is not None:
            count_changes(gradient)
        self._version = -1 if gradient is None else gradient._version

    def forget(self) -> None:
        """What was noted is of no step that goes on."""
        self._version = None

    def changed(self) -> bool:
        """Whether the gradient is another one than the last `note` saw; forgets that, and what stood in is gone."""
        version, self._version = self._version, None
        gradient = self.parameter.grad
        self.withdraw()
        return version is not None and (gradient is None or gradient._version != version)

    def withdraw(self) -> None:
        """What stood in is gone."""
        zeros, self._zeros = self._zeros, None
        if zeros is not None and self.parameter.grad is zeros:
            self.parameter.grad = None
