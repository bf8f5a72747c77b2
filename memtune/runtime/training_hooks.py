"""Hooks into the training loop: `optimizer.step`, `module.forward` and the end of each backward.

`step` and `forward` are replaced on the object, compatible with the user's hooks, profilers and learning rate
schedulers. The user's step pre-hooks run before memtune's, which look for changed gradients, offload them and
free them; the user's post-hooks run after memtune's, which reload the new weights. A user's hook that raises
therefore sees the same state as with the plain optimizer: nothing is updated yet, or everything is.

The autograd engine keeps callbacks for the end of a backward with the running backward and drops them,
uncalled, if it raises (out of memory, a user's hook). A queued callback therefore lives exactly as long as
its backward may still end: if it is freed without having been called, that backward has raised. A nested
forward, or a second forward before the backward, finds it alive.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Final, ParamSpec

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.shown_grad import hide_spent, show_as_spent, spent_as_none

_MARK: Final = "_wrapped_by_lr_sched"
_OWN: Final = "_memtune_step"
_NOT_LAST = "Tuned.micro_batch(last=False), after which optimizer.step() updates all"
_LOAD = "load the last checkpoint with Tuned.load_state_dict, and continue from there"


@dataclass(frozen=True, eq=False)
class _OwnHook:
    """Marks a hook of memtune's among the user's."""

    call: Callable[[Optimizer, Any, Any], None]

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Run the hook, with the arguments that torch passes to step hooks."""
        with spent_as_none():  # until the hook that ends it has run
            self.call(optimizer, args, kwargs)


def before_step(
    optimizer: Optimizer, hook: Callable[[Optimizer, Any, Any], None], *, last: bool = False
) -> None:
    """Call `hook` when the optimizer's step begins, after the user's hooks.

    It runs before the hooks registered here so far, or after them with `last`.
    """
    hooks: Any = optimizer._optimizer_step_pre_hooks
    # An optimizer with such a hook has a replaced `step`, which restores the order at each call.
    hooks.move_to_end(optimizer.register_step_pre_hook(_OwnHook(hook)).id, last=last)
    # Once: the replaced `step` restores the order of all such hooks.
    if _OWN not in vars(getattr(optimizer.step, "__func__", optimizer.step)):
        replace_step(optimizer, optimizer.step)


def after_step(optimizer: Optimizer, hook: Callable[[Optimizer, Any, Any], None]) -> RemovableHandle:
    """Call `hook` after the optimizer's update, before the user's hooks and those registered so far."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle


def call_when_grad_ready(context: Context, calls: Mapping[nn.Parameter, Callable[[Any], None]]) -> None:
    """Call the value of each parameter when its gradient is accumulated, after the user's hooks of it."""
    handles = []
    for parameter, call in calls.items():
        # One by one: if the next registration fails, this one is undone.
        handles.append(parameter.register_post_accumulate_grad_hook(call))
        context.undo.callback(handles[-1].remove)
    # The user registers hooks at any time, so the order is restored when a forward begins.
    hook = UncopiedHook(partial(_run_last, handles))
    context.undo.callback(context.model.register_forward_pre_hook(hook).remove)


def _run_last(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks and next(reversed(hooks)) != handle.id:
            # Not `move_to_end`: autograd reads the dictionary's own order.
            hooks[handle.id] = hooks.pop(handle.id)


def _order_hooks(optimizer: Optimizer) -> None:
    hooks: Any = optimizer._optimizer_step_pre_hooks
    # Users register hooks at any time, so the order is checked at each step; it costs a comparison of two
    # short lists.
    mine = [key for key, hook in hooks.items() if isinstance(hook, _OwnHook)]
    if mine != list(hooks)[len(hooks) - len(mine) :]:
        for key in mine:
            hooks.move_to_end(key)


def replace_step(optimizer: Optimizer, step: Callable[..., Any]) -> None:
    """Make `optimizer.step(...)` call `step(...)`; schedulers, built before or after, count it as one step.

    Args:
        optimizer: Optimizer whose `step` is replaced.
        step: The new step, without the optimizer as an argument; it runs the optimizer's step hooks itself.
    """
    # A scheduler wraps `step` when it is built, marks the wrapper, and warns at its own first step if the
    # mark is missing; the wrapper notes that the optimizer was called. The replacement notes the call and
    # carries the mark, so a scheduler that is built later does not wrap it again. A closure
    # (`optimizer.step(closure)`) runs before the step hooks, because its backward makes the gradients that
    # they offload, check and reduce; torch's optimizers, too, call it before they update.

    @functools.wraps(type(optimizer).step)  # GradScaler and others read its signature
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._opt_called = True  # set by the scheduler's wrapper, which this function replaces
        _order_hooks(self)
        closure = args[0] if args else kwargs.pop("closure", None)
        if closure is None:
            return step(*args[1:], **kwargs)
        # `Optimizer.step` of torch runs its closure under `enable_grad` for the same reason: step itself is
        # under `no_grad`.
        with torch.enable_grad():
            loss = closure()
        step(*args[1:], **kwargs)
        return loss

    vars(called).update({_MARK: True, _OWN: step})
    optimizer.step = MethodType(called, optimizer)  # type: ignore[method-assign]


def is_own_step(optimizer: Optimizer) -> bool:
    """Return True if `optimizer.step` is its class's, but for hooks of memtune and schedulers."""
    step: Any = optimizer.step
    while True:
        function = getattr(step, "__func__", step)
        if function is type(optimizer).step:
            return True
        known = getattr(function, "__dict__", {})
        if _OWN in known:
            step = known[_OWN]
        elif _MARK in known:
            step = function.__wrapped__
        else:
            return False


def with_hooks(optimizer: Optimizer, update: Callable[..., Any]) -> Callable[..., Any]:
    """Return `update` with the optimizer's step hooks before and after it, as in `Optimizer.step`."""

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return update(*args, **kwargs)

    # `profile_hook_step` is what torch wraps every `step` with: it runs the hooks and names the profiler's
    # range.
    return MethodType(Optimizer.profile_hook_step(step), optimizer)


def keep_groups(optimizer: Optimizer) -> None:
    """Keep the parameter group objects when a state is loaded."""
    # `load_state_dict` makes new ones, while updaters hold references to the old ones.
    kept = list(optimizer.param_groups)

    def put_back(_: Optimizer) -> None:
        for index, (group, loaded) in enumerate(zip(kept, optimizer.param_groups, strict=False)):
            if loaded is not group:
                group.clear()
                group.update(loaded)
                optimizer.param_groups[index] = group

    optimizer.register_load_state_dict_post_hook(put_back)


P = ParamSpec("P")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Return a hook that calls the bound `method` while its owner lives.

    Another object, such as a hook of the optimizer, must keep the owner alive.
    """
    # Tensors hold their hooks in C++, where Python's cycle collector cannot follow them. Not `WeakMethod`,
    # which calls Python code and makes a method each time: these run for every gradient.
    owner, function = weakref.ref(method.__self__), method.__func__  # type: ignore[attr-defined]

    def hook(*args: P.args, **kwargs: P.kwargs) -> None:
        # Dead where the model outlives the technique, such as after `undo`: the hook then does nothing.
        there = owner()
        if there is not None:
            function(there, *args, **kwargs)

    return hook


class UncopiedHook:
    """Module hook that is not copied or pickled with the module.

    Args:
        call: The hook.
        with_args: Call it with the arguments that torch passes; otherwise without any.
    """

    __slots__ = ("_call", "_with_args")

    def __init__(self, call: Callable[..., None], *, with_args: bool = False) -> None:
        self._call, self._with_args = call, with_args

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        self._call(*args) if self._with_args else self._call()

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _ignore


def _ignore(*_: Any) -> None:
    pass


class ForwardWrapper:
    """Replacement of a module's forward; copies and pickles of the module get the original forward.

    With the function itself, a copy would run the original module with the original's weights.

    Args:
        call: The function.
        before: The module's forward until now.
    """

    alternatives: tuple[Callable[..., Any], ...] = ()
    """Forwards of which the function runs one (`runtime.forward_switch`); none if it always runs the same."""

    def __init__(self, call: Callable[..., Any], before: Callable[..., Any]) -> None:
        self._call, self.__wrapped__ = call, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> Any:
        return _original_forward, (self.__wrapped__,)


def _original_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class ReplacedForward:
    """Base of classes that run a module differently; `install` replaces the module's forward by `forward`.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._original: Callable[..., Any] = module.forward
        # A forward that another wrapper has set, or the class's, which `remove` restores by deleting the
        # attribute.
        self._had_own = "forward" in vars(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run instead of the module's forward; by default that forward itself."""
        return self._original(*args, **kwargs)

    def install(self) -> None:
        """Replace the module's forward by `forward`."""
        self.module.forward = self.forward

    def remove(self) -> None:
        """Restore the module's own forward."""
        if self._had_own:
            self.module.forward = self._original
        else:
            vars(self.module).pop("forward", None)

    @property
    def is_installed(self) -> bool:
        """Return True if the module's forward is this one, or a wrapper of this one."""
        return _wraps(vars(self.module).get("forward"), self.forward)


def _wraps(forward: Any, wanted: Callable[..., Any]) -> bool:
    """Return whether `forward` is `wanted`, or a wrapper of it."""
    # Other wrappers may lie around it; each has its original, or torch's `__wrapped__`.
    while forward is not None and forward != wanted:
        if isinstance(forward, ForwardWrapper) and forward.alternatives:
            return any(_wraps(each, wanted) for each in forward.alternatives)
        around = getattr(forward, "__self__", None)
        forward = (
            around._original if isinstance(around, ReplacedForward) else getattr(forward, "__wrapped__", None)
        )
    return forward is not None


class BackwardEnd:
    """Queue of a callback for the end of each backward.

    Args:
        ends: Called at the end of each backward in which `expect` was called.
        raised: Called by the first `settle` or `expect` after such a backward has raised, to drop its state.
        is_last: Call `ends` after the callbacks that others queue in this backward, such as FSDP2's, which
            reduces the gradients of modules whose inputs need none.
    """

    def __init__(
        self, ends: Callable[[], None], raised: Callable[[], None] = lambda: None, *, is_last: bool = False
    ) -> None:
        self._ends, self._raised, self._is_last = ends, raised, is_last
        self._queued: weakref.ref[_Queued] | None = None

    def expect(self) -> bool:
        """Queue the callback for the running backward; return True for the first call in this backward."""
        # A dead reference to an earlier backward would look like a callback that is already queued.
        self.settle()
        if self._queued is not None:
            return False
        # A new object for each backward: its death tells that this backward has raised.
        queued = _Queued(self._end, again=self._is_last)
        self._queued = weakref.ref(queued)  # weak: only the engine may keep it alive
        Variable._execution_engine.queue_callback(queued)
        return True

    @property
    def is_near(self) -> bool:
        """Return True inside a backward in which `expect` was called."""
        return self._queued is not None and self._queued() is not None

    def settle(self) -> None:
        """Call `raised` if the last expected backward has raised."""
        if self._queued is not None and self._queued() is None:
            self._queued = None
            self._raised()

    def _end(self) -> None:
        self._queued = None
        with spent_as_none():  # an earlier backward of this step may have used some
            self._ends()


class _Queued:
    """Callback that only the autograd engine references; with `again` it goes to the queue's end once."""

    def __init__(self, call: Callable[[], None], *, again: bool) -> None:
        self._call, self._again = call, again

    def __call__(self) -> None:
        # The engine calls its callbacks in order, also those that callbacks queue: at the second call all
        # others have run.
        if self._again:
            self._again = False
            Variable._execution_engine.queue_callback(self)
        else:
            self._call()


class EarlyUpdates:
    """Updates made before `optimizer.step()`, which cannot be undone; tracked until that call or a loaded
    state ends the step.

    Args:
        context: Context of the model.
        what: Name of an updated thing in the singular, for messages.
        otherwise: Settings that update in `optimizer.step()` alone, for messages.
    """

    def __init__(
        self, context: Context, what: str, otherwise: str = "offload: {states: {kind: optimizer_cpu}}"
    ) -> None:
        self._what, self._updated, self._raised = what, set[Hashable](), False
        # Weakly: a gradient's error refers to this object, and a weight must not keep its model.
        self._model, self._otherwise = weakref.ref(context.model), otherwise
        self._used = set[nn.Parameter]()
        self._spent = list[nn.Parameter]()
        self._is_loaded = False
        context.events.weights_loaded.subscribe(self._loaded)
        context.events.grads_cleared.subscribe(lambda _: self._drop())
        for module in context.model.modules():
            hook = UncopiedHook(weakly(self._values_loaded))
            context.undo.callback(module.register_load_state_dict_post_hook(hook).remove)
        loaded = weakly(self._values_loaded)
        context.undo.callback(context.optimizer.register_load_state_dict_post_hook(loaded).remove)

    def add(self, updated: Iterable[Hashable], parameters: Iterable[nn.Parameter]) -> None:
        """Record that these are updated, from the gradients of `parameters`."""
        self._updated.update(updated)
        self._used.update(parameters)

    def require_first(self, parameter: nn.Parameter) -> None:
        """Refuse a gradient of a parameter that this step has updated already.

        Raises:
            ApplyError: Backward ran twice in the last micro-batch, or reentrant checkpoints ran in it.
        """
        if self._used and parameter in self._used:
            raise ApplyError(
                f"The gradient of {self._name_of(parameter)} was ready again after its update.",
                evidence=(
                    "The update had the first part alone: in the last micro-batch backward ran twice, or"
                    " parts that share the weight ran under reentrant checkpoints."
                ),
                fix=(
                    "one backward, of the sum of the losses; torch.utils.checkpoint with use_reentrant=False;"
                    f" or  {self._otherwise}"
                ),
                code="MT367",
            )

    def raised(self) -> None:
        """Record that the step's backward has raised."""
        # Without updates the step may simply be repeated, as in the plain loop.
        self._raised = bool(self._updated)

    def step_goes_on(self) -> None:
        """Refuse to continue a step whose backward has raised after updates.

        Raises:
            ApplyError: The backward raised after updates.
        """
        self._hide_spent()
        if self._raised:
            self.step_begins()
        if self._is_loaded:
            raise ApplyError(
                "Weights or optimizer state were loaded between a backward that had updated some and its"
                " optimizer.step().",
                evidence="The load has replaced these updates, and their gradients are no more.",
                fix=f"load after optimizer.step(); or  {_NOT_LAST}",
                code="MT364",
            )

    def backward_ends(self) -> None:
        """Have code that reads or sets a gradient that has been used raise, until the step ends."""
        self._spent = list(self._used)
        for parameter in self._spent:
            show_as_spent(parameter, partial(self._spent_error, parameter))

    def _spent_error(self, parameter: nn.Parameter) -> ApplyError:
        return ApplyError(
            f"The gradient of {self._name_of(parameter)} has been used and freed by an update inside"
            " backward: it can be neither read nor changed.",
            evidence="Tuned.micro_batch(last=True) had allowed the update.",
            fix=f"{_NOT_LAST}; or  {self._otherwise}",
            code="MT364",
        )

    def _name_of(self, parameter: nn.Parameter) -> str:
        model = self._model()
        named = () if model is None else model.named_parameters()
        return next((name for name, each in named if each is parameter), f"a weight {tuple(parameter.shape)}")

    def _hide_spent(self) -> None:
        while self._spent:
            hide_spent(self._spent.pop())

    def _values_loaded(self, *_: Any) -> None:
        self._is_loaded |= bool(self._updated) and not self._raised

    def _loaded(self) -> None:
        self._values_loaded()
        self.forget()

    def _drop(self) -> None:
        self._is_loaded = False

    def step_begins(self) -> None:
        """Refuse to begin a step while an earlier one is open.

        Raises:
            ApplyError: An earlier step has updates and was not ended.
        """
        self._drop()
        self._hide_spent()
        if self._updated:
            n_updated = len(self._updated)
            raise ApplyError(
                "A step was begun and optimizer.step() did not end it.",
                evidence=(
                    f"{n_updated} {self._what}{'s were' if n_updated > 1 else ' was'} updated inside"
                    " backward, which cannot be undone."
                ),
                fix=_LOAD,
                code="MT368",
            )

    def forget(self) -> None:
        """Clear the record: `optimizer.step()` has ended the step, or a loaded state replaces the updates."""
        self._hide_spent()
        self._updated.clear()
        self._used.clear()
        self._raised = False


class PartialStep:
    """Tracker of an optimizer step that raised between its first and its last update.

    Later steps would start from partly updated weights.

    Args:
        context: Context of the model; loading weights there clears the flag.
    """

    def __init__(self, context: Context) -> None:
        self.is_it = False
        context.events.weights_loaded.subscribe(self.forget)

    def forget(self) -> None:
        """Clear the flag: all weights and all state are replaced."""
        self.is_it = False

    @contextmanager
    def step_updates(self) -> Iterator[None]:
        """Wrap all updates of a step; an exception inside leaves the step partial.

        Raises:
            ApplyError: An earlier step is partial.
        """
        self.refuse()
        try:
            yield
        except BaseException:
            self.is_it = True
            raise

    def refuse(self) -> None:
        """Refuse to start the next step after a partial one.

        Raises:
            ApplyError: An earlier step is partial.
        """
        if self.is_it:
            raise ApplyError(
                "optimizer.step() raised in the middle of an update.",
                evidence=(
                    "Some weights, or their state, are updated and others are not, which cannot be undone."
                ),
                fix=_LOAD,
                code="MT368",
            )


@contextmanager
def unhooked(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Disable hooks on gradients of `parameters` in this context: `autograd.grad` calls them for an inner
    graph, too, and the outer graph does so afterwards, with the whole gradient.
    """
    # `_backward_hooks` is the dictionary that autograd reads, so emptying it in place is enough.
    held = [(hooks, dict(hooks)) for each in parameters if (hooks := each._backward_hooks)]
    try:
        for hooks, _ in held:
            hooks.clear()
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)
