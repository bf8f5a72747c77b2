"""Update each parameter inside backward as soon as its gradient is complete, and free the gradient.

Known as fused backward (LOMO, and `register_post_accumulate_grad_hook` in PyTorch's tutorial). The pass
`offload.optimizer.fused_backward_pass` predicts it op by op. Invariants:

- A gradient is complete when autograd has added its last part in the last micro-batch. Only `Tuned.step` and
  `Tuned.micro_batch` tell which micro-batch is the last one. In other loops all parameters are updated in
  `optimizer.step()`, so clipping and gradient scalers work, no byte is saved, and one warning reports it.
- `optimizer.step()` updates the remaining parameters and runs its hooks; post-step hooks find all parameters
  updated.
- The smallest gradient is kept until the step as a sentinel: scaling of gradients between backward and step
  (clipping by norm, a loss scaler) changes it and raises, because the others have been used by then.
- An update cannot be undone: a step with updates that `optimizer.step()` did not end (skipped, or an error)
  is refused at the next micro-batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from memtune import refusals
from memtune.errors import ApplyError
from memtune.offload.core import not_one_by_one, sentinel_index
from memtune.offload.gradients import SentinelGradient
from memtune.runtime import (
    BackwardEnd,
    Context,
    EarlyUpdates,
    after_step,
    before_step,
    call_when_grad_ready,
    spent_as_none,
    weakly,
)

_PLAIN = "execution: {order: {kind: program}}"


class FusedBackward:
    """Updates the parameters of `context`'s optimizer inside backward.

    Args:
        context: Its model and optimizer; grad-ready hooks are registered on the model's trained parameters.

    Raises:
        ApplyError: The optimizer does not update parameters one by one, a hook runs before its step, or
            another technique reduces or moves gradients.
    """

    def __init__(self, context: Context) -> None:
        _refuse(context)
        self._optimizer, self._before_grad_use = context.optimizer, context.events.before_grad_use
        # The function inside torch's decorator: hooks and profiling would run once per parameter.
        self._step = type(context.optimizer).step.__wrapped__  # type: ignore[attr-defined]
        trained = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
        self._sentinel = SentinelGradient(
            trained[sentinel_index([parameter.nbytes for parameter in trained])]
        )
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in context.model.named_parameters()
        }
        self._groups: dict[Tensor, dict[str, Any]] = {}
        self._is_last = self._announced = self._changed = False
        self._early_updates = EarlyUpdates(context, "parameter", _PLAIN)
        self._backward_end = BackwardEnd(self._backward_ends, self._early_updates.raised)
        self._updated: set[Tensor] = set()  # in the last backward
        self.n_early = 0
        # All but one: with every gradient freed inside backward, a later clip would find nothing and change
        # nothing.
        calls = dict.fromkeys(trained, weakly(self._complete))
        calls[self._sentinel.parameter] = weakly(self._on_sentinel_ready)
        call_when_grad_ready(context, calls)
        context.loop.sync = self.sync
        context.events.weights_loaded.subscribe(self._sentinel.forget)
        before_step(context.optimizer, self._step_begins)
        context.undo.callback(after_step(context.optimizer, self._step_ends).remove)

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Return the context of a micro-batch; backward of the last one updates parameters.

        Raises:
            ApplyError: A step with updates was not ended by `optimizer.step()`.
        """
        self._backward_end.settle()
        self._early_updates.step_begins()
        self._announced = True
        self._is_last = last
        self._sentinel.forget()
        self._updated.clear()
        if last:
            # Read again in each step: schedulers replace settings, and loads the groups themselves.
            self._groups = {each: group for group in self._optimizer.param_groups for each in group["params"]}
        try:
            yield
        finally:
            self._is_last = False

    @torch.no_grad()
    def _complete(self, parameter: Tensor) -> None:
        """Update `parameter` with its group's current settings and free its gradient; grad-ready hook."""
        group = self._groups.get(parameter) if self._is_last else None
        if group is None or parameter.grad is None:
            return  # not the last micro-batch, or the user's hook has used and freed the gradient
        assert isinstance(parameter, nn.Parameter)
        self._early_updates.require_first(parameter)
        self._backward_end.expect()
        self._updated.add(parameter)
        self._early_updates.add([parameter], [parameter])
        self._before_grad_use.emit(parameter, parameter.grad)
        # The optimizer's own step over a group of one parameter, with the settings that its group has now.
        # A foreach optimizer would otherwise update all parameters that have a gradient by now.
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            self._step(self._optimizer)
        finally:
            self._optimizer.param_groups = groups
        parameter.grad = None

    def _on_sentinel_ready(self, parameter: Tensor) -> None:
        self._sentinel.on_grad_ready()
        if self._is_last:
            self._backward_end.expect()

    def _backward_ends(self) -> None:
        self.n_early = len(self._updated)
        self._sentinel.record_version()
        self._early_updates.backward_ends()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._backward_end.settle()
        self._early_updates.step_goes_on()
        # `changed` removes a placeholder, which the step must not see; a real gradient is checked after the
        # step.
        self._changed = self._sentinel.has_placeholder and self._sentinel.changed()

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check the sentinel gradient; warn once if the last micro-batch was never announced."""
        self._early_updates.forget()
        if not self._announced:
            self._announced = True
            warnings.warn(
                "memtune: execution: {order: {kind: roam}} saves memory only if the last micro-batch is"
                " announced: train with Tuned.step(batches), or run each micro-batch in "
                " with tuned.micro_batch(last=...).",
                RuntimeWarning,
                stacklevel=3,
            )
        if self._sentinel.changed() or self._changed:
            raise refusals.error_of(
                refusals.gradients_changed(_PLAIN),
                "All but the smallest had been used by then: parameters were updated inside backward.",
            )

    @spent_as_none()
    def check(self) -> dict[str, Any]:
        """Return the number of parameters that the last backward updated.

        Raises:
            ApplyError: A gradient that has been used exists again.
        """
        left = [
            name
            for parameter, name in self._names.items()
            if parameter in self._updated and parameter.grad is not None
        ]
        if left:
            raise ApplyError(
                f"the gradient of {left[0]} is there, though it was used inside backward.", code="MT309"
            )
        return {
            "updated_in_backward": self.n_early,
            "of_parameters": sum(p.requires_grad for p in self._names),
        }


def _refuse(context: Context) -> None:
    optimizer = context.optimizer
    why = ""
    if (
        context.placement.world_size > 1
        or context.loop.sync is not None
        or context.placement.optimizer_params
    ):
        why = (
            "Gradients are reduced over ranks or offloaded, or the optimizer holds other tensors than the"
            " model."
        )
    elif unknown := not_one_by_one(optimizer):
        why = f"{unknown}."
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        why = "The optimizer is differentiable."
    elif any(
        not (each.__module__ or "").startswith("memtune.")
        for each in optimizer._optimizer_step_pre_hooks.values()
    ):
        why = "A hook runs before the optimizer's step, and gradients are freed by then."
    elif {type(each) for group in optimizer.param_groups for each in group["params"]} - {
        nn.Parameter,
        Tensor,
        FakeTensor,
    }:
        why = "The optimizer holds tensors that are no plain parameters."
    if why:
        raise ApplyError(
            "execution: {order: {kind: roam}} cannot update parameters at their gradients here.",
            evidence=why,
            fix=_PLAIN,
            code="MT315",
        )
