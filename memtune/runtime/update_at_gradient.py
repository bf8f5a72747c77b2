"""The optimizer updates each parameter as soon as its gradient is complete, inside backward, and the gradient is let go.

Six rules, which the pass `passes.update_at_gradient` follows op by op:

Rule 1. A gradient is complete when autograd has added the last part of it in the last micro-batch: then the optimizer's own step
        runs for this parameter alone, with the settings of its group at that time, and the gradient is let go.
Rule 2. That the micro-batch is the last one is known from `Tuned.step` or `Tuned.micro_batch`; nothing else can tell a sum that
        is complete from one that more will be added to. In other loops all is updated in `optimizer.step()`, which is then as
        it was: clipping by norm and gradient scalers work, no byte is saved, and one message says so.
Rule 3. `optimizer.step()` updates what has a gradient then: the witness, and parameters whose gradient no backward has completed.
        Its hooks run there, those that run after it find all parameters updated.
Rule 4. The smallest gradient stays until the step, as a witness: whoever changes gradients before the update (clipping by
        norm in a hook, a loss scaler) changes it, and is refused, since the others have been used by then. Zeros stand in for
        one that is missing, until the step begins.
Rule 5. A gradient that lands a second time in the last micro-batch was not complete the first time (a second backward, or a
        reentrant checkpoint around parts that share a weight), and is refused.
Rule 6. An update cannot be taken back: a step that was begun by one and not ended by `optimizer.step()` (skipped, or ended by an
        error) is refused when the next micro-batch begins.
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

from memtune.early_updates import not_one_by_one, witness
from memtune.errors import ApplyError
from memtune.runtime.backward_end import BackwardEnd, never_ended
from memtune.runtime.context import Context
from memtune.runtime.hooks import weakly
from memtune.runtime.own_step import after_step, before_step
from memtune.runtime.witness import Witness

_PLAIN = "execution: {order: {kind: program}}"


class UpdateAtGradient:
    """Has `context`'s optimizer update its parameters inside backward.

    Args:
        context: Its model and optimizer; hooks are put on the model's trained parameters.

    Raises:
        ApplyError: The optimizer is none that updates parameters one by one, something else hooks into its step, or another
            technique says when gradients are reduced or where they go.
    """

    def __init__(self, context: Context) -> None:
        _refuse(context)
        self._optimizer, self._before_use = context.optimizer, context.before_use
        self._step = type(context.optimizer).step.__wrapped__  # type: ignore[attr-defined]  # without hooks and profiling
        trained = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
        self._witness = Witness(trained[witness([parameter.nbytes for parameter in trained])])
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in context.model.named_parameters()}
        self._groups: dict[Tensor, dict[str, Any]] = {}
        self._is_last = self._begun = self._told = False
        self._at_end = BackwardEnd(self._backward_ends)
        self._changed = False
        self._landed: set[Tensor] = set()
        self.n_early = 0
        for parameter in trained:
            lands = self._witness_lands if parameter is self._witness.parameter else self._complete
            context.undo.callback(parameter.register_post_accumulate_grad_hook(weakly(lands)).remove)
        context.sync = self.sync
        context.reloaded.append(self._reloaded)
        before_step(context.optimizer, self._step_begins)
        context.undo.callback(after_step(context.optimizer, self._step_ends).remove)

    def _reloaded(self) -> None:
        self._begun = False  # what was updated has been replaced
        self._witness.forget()

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """The context of a micro-batch: in the last one's backward parameters are updated (Rule 2).

        Raises:
            ApplyError: Rule 6.
        """
        if self._begun:
            fix = f"call optimizer.step() after each last micro-batch, or  {_PLAIN}"
            raise never_ended(len(self._landed), "parameter", fix)
        self._told = True
        self._is_last = last
        self._witness.forget()
        self._landed.clear()
        if last:
            self._groups = {each: group for group in self._optimizer.param_groups for each in group["params"]}
        try:
            yield
        finally:
            self._is_last = False

    @torch.no_grad()
    def _complete(self, parameter: Tensor) -> None:
        """Rule 1."""
        group = self._groups.get(parameter) if self._is_last else None
        if group is None:
            return
        assert isinstance(parameter, nn.Parameter)
        if parameter in self._landed:
            raise ApplyError(
                f"The gradient of {self._names[parameter]} was put in place twice in the last micro-batch.",
                evidence="It was updated after the first time, with a part of its gradient: this run cannot go on.",
                fix=f"one backward for each micro-batch, torch.utils.checkpoint with use_reentrant=False, or  {_PLAIN}",
                code="MT367",
            )  # fmt: skip
        self._at_end.expect()
        self._landed.add(parameter)
        self._begun = True
        assert parameter.grad is not None
        for look in self._before_use:
            look(parameter, parameter.grad)
        groups, self._optimizer.param_groups = self._optimizer.param_groups, [{**group, "params": [parameter]}]
        try:
            self._step(self._optimizer)
        finally:
            self._optimizer.param_groups = groups
        parameter.grad = None

    def _witness_lands(self, parameter: Tensor) -> None:
        self._witness.landed()
        if self._is_last:
            self._at_end.expect()

    def _backward_ends(self) -> None:
        self.n_early = len(self._landed)
        self._witness.note()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._changed = self._witness.stands_in and self._witness.changed()

    def _step_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Rule 4; once, a message where nobody says which micro-batch is the last (Rule 2)."""
        self._begun = False
        if not self._told:
            self._told = True
            warnings.warn(
                "memtune: execution: {order: {kind: roam}} saves memory only where it is told which micro-batch is the last one: "
                "train with Tuned.step(batches), or run each micro-batch in  with tuned.micro_batch(last=...).",
                RuntimeWarning, stacklevel=3,
            )  # fmt: skip
        if self._witness.changed() or self._changed:
            raise ApplyError(
                "Gradients were changed between backward and the optimizer's step, as clipping by norm does.",
                evidence="All but the smallest had been used by then: parameters were updated inside backward.",
                fix=_PLAIN, code="MT364",
            )  # fmt: skip

    def check(self) -> dict[str, Any]:
        """How many parameters the last backward updated.

        Raises:
            ApplyError: A gradient that has been used is there again.
        """
        left = [name for parameter, name in self._names.items() if parameter in self._landed and parameter.grad is not None]
        if left:
            raise ApplyError(f"the gradient of {left[0]} is there, though it was used inside backward.", code="MT309")
        return {"updated_in_backward": self.n_early, "of_parameters": sum(p.requires_grad for p in self._names)}


def _refuse(context: Context) -> None:
    optimizer = context.optimizer
    why = ""
    if context.ranks > 1 or context.sync is not None or context.represented:
        why = "Gradients are summed over ranks or leave the device, or the optimizer holds other tensors than the model."
    elif unknown := not_one_by_one(optimizer):
        why = f"{unknown}."
    elif any(group.get("differentiable") for group in optimizer.param_groups):
        why = "The optimizer is differentiable."
    elif any(not (each.__module__ or "").startswith("memtune.") for each in optimizer._optimizer_step_pre_hooks.values()):
        why = "A hook runs before the optimizer's step, and gradients are gone by then."
    elif {type(each) for group in optimizer.param_groups for each in group["params"]} - {nn.Parameter, Tensor, FakeTensor}:
        why = "The optimizer holds tensors that are no plain parameters."
    if why:
        raise ApplyError(
            "execution: {order: {kind: roam}} cannot update parameters at their gradients here.", evidence=why,
            fix=_PLAIN, code="MT315",
        )  # fmt: skip
