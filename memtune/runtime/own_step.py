"""An optimizer's `step` replaced on the object: hooks, profilers and learning rate schedulers find what they look for.

The user's hooks before a step, whenever they were registered, run before memtune's: those look for changed gradients, bring them
down and let them go. The user's hooks after a step run after memtune's, which bring the new weights to where they belong. So one
that raises finds, and leaves, what it would beside the plain optimizer: nothing is updated yet, or all is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_MARK: Final = "_wrapped_by_lr_sched"
_OWN: Final = "_memtune_step"


@dataclass(frozen=True, eq=False)
class _OwnHook:
    """Ours, among the user's."""

    call: Callable[[Optimizer, Any, Any], None]

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """As torch calls any hook."""
        self.call(optimizer, args, kwargs)


def before_step(optimizer: Optimizer, hook: Callable[[Optimizer, Any, Any], None], *, last: bool = False) -> None:
    """Call `hook` when the optimizer's step begins: after the user's, and before or after (`last`) those given here so far."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    hooks.move_to_end(optimizer.register_step_pre_hook(_OwnHook(hook)).id, last=last)
    if _OWN not in vars(getattr(optimizer.step, "__func__", optimizer.step)):
        replace_step(optimizer, optimizer.step)


def after_step(optimizer: Optimizer, hook: Callable[[Optimizer, Any, Any], None]) -> RemovableHandle:
    """Call `hook` when the optimizer's step has updated: before the user's, and before those given here so far."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle


def _order_hooks(optimizer: Optimizer) -> None:
    hooks: Any = optimizer._optimizer_step_pre_hooks
    mine = [key for key, hook in hooks.items() if isinstance(hook, _OwnHook)]
    if mine != list(hooks)[len(hooks) - len(mine) :]:
        for key in mine:
            hooks.move_to_end(key)


def replace_step(optimizer: Optimizer, step: Callable[..., Any]) -> None:
    """From here on `optimizer.step(...)` is `step(...)`, and a scheduler, built before or after, counts it as one.

    A scheduler wraps `step` when it is built, marks what it made, and warns when the mark is gone at its own first step; the
    wrapper's business is to note that the optimizer was called. What is put here notes it and bears the mark: a scheduler that is
    built later leaves it as it is.

    Args:
        optimizer: Whose step it is.
        step: What runs, the optimizer's step hooks included; without the optimizer as an argument.
    """

    @functools.wraps(type(optimizer).step)  # GradScaler and others read its signature
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # what the scheduler's wrapper would note
        _order_hooks(self)
        return step(*args, **kwargs)

    vars(called).update({_MARK: True, _OWN: True})
    optimizer.step = MethodType(called, optimizer)  # type: ignore[method-assign]


def with_hooks(optimizer: Optimizer, update: Callable[..., Any]) -> Callable[..., Any]:
    """`update` with the optimizer's step hooks before and after it, as its own step has them."""

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return update(*args, **kwargs)

    return MethodType(Optimizer.profile_hook_step(step), optimizer)


def keep_groups(optimizer: Optimizer) -> None:
    """Groups stay the objects that they are when a state is loaded, which makes new ones: whoever updates refers to them."""
    kept = list(optimizer.param_groups)

    def put_back(_: Optimizer) -> None:
        for index, (group, loaded) in enumerate(zip(kept, optimizer.param_groups, strict=False)):
            if loaded is not group:
                group.clear()
                group.update(loaded)
                optimizer.param_groups[index] = group

    optimizer.register_load_state_dict_post_hook(put_back)
