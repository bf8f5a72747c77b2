"""Gradients of which some have left the device: whoever changes, or lets go of, the others alone before the step is told so.

Four rules:

Rule 1. When a backward has ended, all gradients are noted: those that stayed on the device, and the sums of those that left it.
        What is changed from then on, as by clipping by norm, is known by its version.
Rule 2. It is looked for when the step begins and when the next forward does, which would add to what was changed.
Rule 3. `zero_grad` of the optimizer, of the model and of a part of it says what it clears. Nobody says so of `p.grad = None`,
        which lets go of nothing that has left the device: where none that stayed is there any more, that is refused.
Rule 4. Whoever changes all, as clipping by norm of what is in `optimizer.param_groups` does (`runtime.held_parameter`), is
        right, where all are in this process's memory and none has been used inside backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.gathered_rows import count_changes
from memtune.runtime.held_parameter import HeldParameter, held_in_place
from memtune.runtime.tiers import SSD, tier_of


class WatchedGradients:
    """Of one model.

    Args:
        context: Of the model; gets a listener in `cleared`.
        stay: Parameters whose gradients stay on the device until the step.
        held: What holds the gradients of the others.
        fix: For errors: what works with clipping.
    """

    def __init__(self, context: Context, stay: Collection[nn.Parameter], held: Collection[nn.Parameter], fix: str) -> None:
        self._stay, self._held, self._fix = stay, held, fix
        self._versions: dict[nn.Parameter, int] = {}
        self._context, self._used = context, set[nn.Parameter]()
        context.before_use.append(lambda parameter, _: self._used.add(parameter))
        context.cleared.append(self._cleared)

    def note(self) -> None:
        """Rule 1: a backward has ended."""
        for each in self._stay:
            if each.grad is not None:
                count_changes(each.grad)
        self._versions = {each: each.grad._version for each in (*self._stay, *self._held) if each.grad is not None}

    def forget(self) -> None:
        """Nothing is noted any more: a step ends, or a backward has raised, and what it left is the user's to clear."""
        self._versions = {}
        self._used.clear()

    def require_unchanged(self) -> None:
        """Rules 2 to 4.

        Raises:
            ApplyError: Gradients were changed or let go.
        """
        stayed = [each for each in self._stay if each in self._versions]
        n_left = len(self._versions) - len(stayed)
        if stayed and all(each.grad is None for each in stayed):
            raise ApplyError(
                f"{len(stayed)} gradients were let go of after a backward, and optimizer.step() has not used them.",
                evidence=f"They are those on the device; {n_left} others have left it, and are still there.",
                fix="optimizer.zero_grad() or model.zero_grad()  in place of  parameter.grad = None", code="MT364",
            )  # fmt: skip
        put = [each for each in self._held if isinstance(each, HeldParameter) and each.is_replaced]
        if put:
            raise ApplyError(
                f"{len(put)} gradients were put in place after a backward whose own have left the device.",
                evidence=f"One has the shape {tuple(put[0].shape)}; which of the two the step is to use cannot be told.",
                fix="change what optimizer.param_groups holds, whose gradients are the ones that a step uses", code="MT364",
            )  # fmt: skip
        changed = [p for p, version in self._versions.items() if p.grad is not None and p.grad._version != version]
        if changed and not self._are_all(changed):
            raise ApplyError(
                "Gradients were changed between backward and the optimizer's step, as clipping by norm does.",
                evidence=f"{len(changed)} were. {n_left} have left the device by then, {len(stayed)} have not: neither are all.",
                fix=self._fix, code="MT364",
            )  # fmt: skip

    def _are_all(self, changed: list[nn.Parameter]) -> bool:
        """Rule 4."""
        used = any(held_in_place(self._context, each).grad is None for each in self._used)
        there = [each.grad for each in changed if each.grad is not None and tier_of(each.grad) != SSD]
        return self._context.ranks == 1 and not used and len(there) == sum(each.grad is not None for each in self._versions)

    def _cleared(self, parameters: Iterable[nn.Parameter]) -> None:
        for each in parameters:
            self._versions.pop(each, None)
