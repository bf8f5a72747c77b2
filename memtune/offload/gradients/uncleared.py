"""Notice loops that rely on gradients which the step that used them has freed, as offload and sharding do.

One that never clears them is warned: in plain PyTorch the next backward would add to them. A second optimizer
of the same parameters is refused: it would find no gradients. The first step finds out whether the config's
mechanisms free gradients; from then on the cost is one flag.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memtune.refusals import error_of, second_optimizer
from memtune.runtime import Context, before_step, spent_as_none

TEXT = (
    "memtune: the gradients of the last step were not cleared by zero_grad. This config has used and freed"
    " them, so this step has the new ones alone, where plain PyTorch adds them up. If the loop cleared them"
    " in another way, nothing differs."
)


def warn_uncleared(context: Context) -> None:
    """Warn once, at a step of `context`'s optimizer that follows another one without `zero_grad`."""
    _Uncleared(context)


class _Uncleared:
    def __init__(self, context: Context) -> None:
        trained = [each for each in context.model.parameters() if each.requires_grad]
        self._chains = [context.placement.param_chain(each) for each in trained]
        self._with_grad: list[list[nn.Parameter]] | None = None
        """Those that had a gradient when the first step began."""
        self._frees, self._is_due, self._used = False, False, False
        context.events.before_grad_use.subscribe(self._on_use)
        context.events.grads_cleared.subscribe(self._on_cleared)
        before_step(context.optimizer, self._step_begins)
        # Not `after_step`: the hooks registered so far free gradients.
        context.undo.callback(context.optimizer.register_step_post_hook(self._step_ends).remove)
        self._trained, self._others = {id(each) for each in trained}, WeakSet([context.optimizer])
        """Optimizers that may step: this config's, and those of other parameters."""
        mine = WeakMethod(self._any_begins)  # torch's list of hooks outlives the model
        every = register_optimizer_step_pre_hook(
            lambda each, *_: begins(each) if (begins := mine()) else None
        )
        finalize(self, every.remove)
        context.undo.callback(every.remove)

    def _on_use(self, *_: Any) -> None:
        self._used = True

    def _on_cleared(self, _: Any) -> None:
        self._is_due = False

    def _any_begins(self, optimizer: Optimizer) -> None:
        # Only until they are cleared: an optimizer around or inside of this one steps before.
        if not self._is_due or optimizer in self._others:
            return
        shared = sum(
            id(each) in self._trained for group in optimizer.param_groups for each in group["params"]
        )
        if shared:
            raise error_of(second_optimizer(shared))
        self._others.add(optimizer)

    def _step_begins(self, *_: Any) -> None:
        if self._is_due:
            self._is_due = self._frees = False  # once
            warnings.warn(TEXT, UserWarning, stacklevel=4)
        if self._with_grad is None:
            self._with_grad = [each for each in self._chains if _has_grad(each)]

    def _step_ends(self, *_: Any) -> None:
        if self._with_grad:
            # The next backward adds to what the model's own parameter has, not to what the optimizer's does.
            self._frees = self._used or not all(_has_grad(chain[:1]) for chain in self._with_grad)
            self._with_grad = []
        self._is_due = self._frees


@spent_as_none()
def _has_grad(chain: list[nn.Parameter]) -> bool:
    return any(each.grad is not None for each in chain)
