"""A run that was made for gradients into some outputs of a model, when others get one: see `OutputsRun`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from memtune.runtime.gives_way import GivingRun
from memtune.runtime.tape import Slot, Tape

_LEFT_OUT = "no gradient flowed into one of its outputs, which may be another time"


def left_out(tape: Tape) -> str:
    """Why `tape` is not run without the mode: outputs without a gradient, '' if there are none that may have one.

    A model that returns its own loss beside what it is the loss of is taken at its word.
    """
    outputs = (tape.outputs[at] for at in tape.asked)
    has_own_loss = all(isinstance(each, Slot) and each.size == () for each in outputs)
    return "" if tape.asked == tape.differentiable or has_own_loss else _LEFT_OUT


class OutputsRun(GivingRun):
    """A forward without the mode; where another output gets a gradient than it was made for, it runs again online.

    What cannot run again (`GivingRun`) is an error then, as it is under any schedule.
    """

    _told: Callable[[str], None]

    def tells(self, told: Callable[[str], None]) -> None:
        """Told before it starts; `told` hears that it ran again, and why."""
        self._told = told

    def all_gradients(self, node: Any) -> list[Tensor | None]:
        """`GivingRun.all_gradients`, whatever output gets one."""
        new = sorted(set(self.gradients) - set(self._captured.tape.asked))
        if new and self.give_way():
            self._told(f"a gradient flows into output {new[0]}, which was not so before")
        return super().all_gradients(node)
