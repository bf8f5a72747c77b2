"""Gradients of which some have left the device: whoever changes, or lets go of, the others alone before the
step is told so.

Four rules:

Rule 1. When a backward has ended, all gradients are noted: those that stayed on the device, and the sums of
those that left it.
        What is changed from then on, as by clipping by norm, is known by its version.
Rule 2. It is looked for when the step begins and when the next forward does, which would add to what was
changed. Rule 3. `zero_grad` of the optimizer, of the model and of a part of it says what it clears. Nobody
says so of `p.grad = None`,
        which lets go of nothing that has left the device: where none that stayed is there any more, that is
        refused.
Rule 4. Whoever changes all, as clipping by norm of what is in `optimizer.param_groups` does
(`offload.core.optimizer_param`), is
        right, where all are in this process's memory and none has been used inside backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memtune.errors import ApplyError
from memtune.offload.core import OptimizerParameter, count_changes
from memtune.runtime import (
    SSD,
    Context,
    UncopiedHook,
    local,
    tier_of,
    track_data,
    untrack_data,
    version_of_data,
)


class WatchedGradients:
    """Of one model.

    Args:
        context: Of the model; its `before_grad_use` and `grads_cleared` are subscribed to.
        stay: Parameters whose gradients stay on the device until the step.
        held: What holds the gradients of the others.
        fix: For errors: what works with clipping.
    """

    def __init__(
        self, context: Context, stay: Collection[nn.Parameter], held: Collection[nn.Parameter], fix: str
    ) -> None:
        self._stay, self._held, self._fix = stay, held, fix
        self._versions: dict[nn.Parameter, int] = {}
        self._context, self._used = context, set[nn.Parameter]()
        context.events.before_grad_use.subscribe(lambda parameter, _: self._used.add(parameter))
        context.events.grads_cleared.subscribe(self._cleared)

    def note(self) -> None:
        """Note the versions of all gradients at the end of a backward."""
        for each in self._stay:
            if each.grad is not None:
                count_changes(each.grad)
        self._versions = {
            each: each.grad._version for each in (*self._stay, *self._held) if each.grad is not None
        }

    def forget(self) -> None:
        """Drop the noted versions: a step ends, or a backward has raised and the user clears gradients."""
        self._versions = {}
        self._used.clear()

    def require_unchanged(self) -> None:
        """Check that gradients are those of the last backward.

        Raises:
            ApplyError: Gradients were changed, replaced or freed.
        """
        stayed = [each for each in self._stay if each in self._versions]
        n_left = len(self._versions) - len(stayed)
        if stayed and all(each.grad is None for each in stayed):
            raise ApplyError(
                f"{len(stayed)} gradients were let go of after a backward, and optimizer.step() has not used"
                " them.",
                evidence=f"They are those on the device; {n_left} others have left it, and are still there.",
                fix="optimizer.zero_grad() or model.zero_grad()  in place of  parameter.grad = None",
                code="MT364",
            )
        put = [each for each in self._held if isinstance(each, OptimizerParameter) and each.is_replaced]
        if put:
            raise ApplyError(
                f"{len(put)} gradients were put in place after a backward whose own have left the device.",
                evidence=(
                    f"One has the shape {tuple(put[0].shape)}; which of the two the step is to use cannot be"
                    " told."
                ),
                fix="change what optimizer.param_groups holds, whose gradients are the ones that a step uses",
                code="MT364",
            )
        changed = [
            p for p, version in self._versions.items() if p.grad is not None and p.grad._version != version
        ]
        if changed and not self._are_all(changed):
            raise ApplyError(
                "Gradients were changed between backward and the optimizer's step, as clipping by norm does.",
                evidence=(
                    f"{len(changed)} were. {n_left} have left the device by then, {len(stayed)} have not:"
                    " neither are all."
                ),
                fix=self._fix,
                code="MT364",
            )

    def _are_all(self, changed: list[nn.Parameter]) -> bool:
        """Return whether every gradient of the step was changed, as clipping through `optimizer.param_groups`
        does.

        False on several ranks, where clipping would need a norm over all of them, and where gradients were
        used already.
        """
        used = any(self._context.placement.optimizer_param(each).grad is None for each in self._used)
        there = [each.grad for each in changed if each.grad is not None and tier_of(each.grad) != SSD]
        alone = self._context.placement.world_size == 1
        return alone and not used and len(there) == sum(each.grad is not None for each in self._versions)

    def _cleared(self, parameters: Iterable[nn.Parameter]) -> None:
        for each in parameters:
            self._versions.pop(each, None)


# One gradient that stays on the device until the optimizer's step and tells whether somebody changed
# gradients meanwhile.
class SentinelGradient:
    """The gradient of `parameter`, which any scaling of gradients (clipping by norm, a loss scaler) changes
    as well.

    Where the parameter took no part in a step (a skipped layer, an expert without tokens), zeros are its
    placeholder until the optimizer's step begins.

    Args:
        parameter: Its gradient is not offloaded.
        has_placeholder: Use a placeholder; otherwise a step in which the parameter took no part counts as
            changed.
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
        """Note the version at the end of a backward; later changes of the gradient are detected."""
        if self.parameter.grad is None and self._may_stand_in:
            self._zeros = self.parameter.grad = torch.zeros_like(self.parameter)
        gradient = self.parameter.grad
        if gradient is not None:
            count_changes(gradient)
        self._version = -1 if gradient is None else gradient._version

    def forget(self) -> None:
        """Drop the noted version: its step does not continue."""
        self._version = None

    def changed(self) -> bool:
        """Return whether the gradient has changed since the last `note`; drop that version and the
        placeholder.
        """
        version, self._version = self._version, None
        gradient = self.parameter.grad
        self.withdraw()
        return version is not None and (gradient is None or gradient._version != version)

    def withdraw(self) -> None:
        """Remove the placeholder, so that the optimizer does not see it."""
        zeros, self._zeros = self._zeros, None
        if zeros is not None and self.parameter.grad is zeros:
            self.parameter.grad = None


# Weights on the device that the user has set since the optimizer did, and that are kept elsewhere too.
def watch_loads(
    context: Context,
    kept: set[nn.Parameter],
    loaded: Callable[[list[nn.Parameter]], None],
    before: Callable[[], None] | None = None,
) -> None:
    """Call `loaded` with those of `kept` whose module has loaded new weights.

    A copied or pickled model has no such hooks.

    Args:
        context: Its model's modules are hooked; a parameter includes its replacement (this rank's rows).
        kept: Parameters with a copy on another tier.
        loaded: Called after each module's load, children before parents.
        before: Called before it.
    """
    for module in context.model.modules():
        chains = (
            context.placement.param_chain(each) for each in module._parameters.values() if each is not None
        )
        mine = [held for chain in chains for held in [each for each in chain if each in kept][:1]]
        if not mine:
            continue
        if before is not None:
            module.register_load_state_dict_pre_hook(UncopiedHook(before))
        module.register_load_state_dict_post_hook(UncopiedHook(lambda mine=mine: loaded(mine)))  # type: ignore[misc]


class ExternalWrites:
    """Rule 2, of the weights of one optimizer that are the model's own parameters, or rows of them.

    Args:
        context: Of the model; its parameters' `data` is looked at from here on, and `weights_gathered` is
            subscribed to.
        weights: What is on the device.
    """

    def __init__(self, context: Context, weights: Iterable[nn.Parameter]) -> None:
        model = set(context.model.parameters())
        whole = {rows: each for each, rows in context.placement.optimizer_params.items() if each in model}
        mine = {each: each if each in model else whole.get(each) for each in weights}
        real = {
            each: of
            for each, of in mine.items()
            if of is not None and not isinstance(local(of.detach()), FakeTensor)
        }
        for of in real.values():
            track_data(of)
            context.undo.callback(untrack_data, of)
        self._of = real
        self._seen = {each: _version_of(of) for each, of in real.items()}
        context.events.weights_gathered.subscribe(self._gathered)

    def _gathered(self) -> None:
        for each, of in self._of.items():
            if each is not of:
                self.wrote(each)

    def wrote(self, weight: nn.Parameter) -> None:
        """The optimizer, or who loads a state, has written it."""
        if weight in self._seen:
            self._seen[weight] = _version_of(self._of[weight])

    def by_others(self, but: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Return the weights that other code has written since, each once.

        Args:
            but: Offloaded weights, to be skipped.
        """
        found = [
            each
            for each, seen in self._seen.items()
            if each not in but and _version_of(self._of[each]) != seen
        ]
        for each in found:
            self.wrote(each)
        return found


def _version_of(weight: nn.Parameter) -> tuple[int, ...]:
    here: Tensor = getattr(weight, "_local_tensor", weight)
    return weight._version, here._version, here.data_ptr(), version_of_data(weight)
