"""Version checks: find gradients and weights that user code changes behind memtune's copies.

Gradients, when some of them are offloaded (`WatchedGradients`):

- At the end of backward all gradients are noted, by the tensor and its version: those on the device and the
  host sums.
- They are compared when the step begins and when the next forward begins, which would add to changed
  gradients.
- Offloaded gradients are shown as `grad` between backward and the step (`runtime.shown_grad`), and are noted
  only where they cannot be, or if a step has used some of them inside backward.
- `zero_grad` of the optimizer, the model or a submodule reports the gradients that it clears. `p.grad = None`
  reports nothing, and frees an offloaded gradient only if that is shown; if it cleared all gradients on the
  device, the check raises.
- torch's functions that clip gradients change all of them (`grad_clipping`), and their versions are noted
  again. Other code that changes all gradients through `optimizer.param_groups`
  (`offload.core.optimizer_param`) is correct if all are in this process's memory and none was used inside
  backward.

Weights on the device that user code writes, although the host has the optimizer's copy: `ExternalWrites`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from memtune import refusals
from memtune.errors import ApplyError
from memtune.offload.core import OptimizerParameter, own_grad
from memtune.runtime import (
    Context,
    UncopiedHook,
    count_changes,
    grad_version,
    is_data_used,
    memory_of,
    spent_as_none,
    track_data,
    untrack_data,
    version_of_data,
)


class _RecordedVersion(NamedTuple):
    """A gradient as it was noted: the tensor and its version."""

    gradient: Callable[[], Tensor | None]
    """A weak reference."""
    version: int

    @classmethod
    def from_gradient(cls, gradient: Tensor) -> _RecordedVersion:
        # Foreach kernels do not count changes of DTensors, nor torch those through `data`.
        count_changes(gradient)
        return cls(weakref.ref(gradient), grad_version(gradient))

    def is_left(self, gradient: Tensor) -> bool:
        """Return True if `gradient` is the noted one, unchanged."""
        return self.gradient() is gradient and self.version == grad_version(gradient)


_NONE = _RecordedVersion(lambda: None, 0)
"""In place of a gradient that was missing."""


class WatchedGradients:
    """Checks that the gradients of a model, some of them offloaded, are those of the last backward.

    Args:
        context: Context of the model; uses, clears and changes of gradients are subscribed to.
        resident: Parameters whose gradients are on the device until the step.
        offloaded: The parameters that have the host sums of the other gradients.
        fix: A config that allows clipping, for the errors.
    """

    def __init__(
        self,
        context: Context,
        resident: Collection[nn.Parameter],
        offloaded: Collection[nn.Parameter],
        fix: str,
    ) -> None:
        self._resident, self._offloaded, self._fix = resident, offloaded, fix
        self._noted: dict[nn.Parameter, _RecordedVersion] = {}
        self._context, self._used, self._spent = context, set[nn.Parameter](), set[nn.Parameter]()
        self._n_cleared = 0  # of the spent ones
        context.events.before_grad_use.subscribe(lambda parameter, _: self._used.add(parameter))
        context.events.grads_cleared.subscribe(self._cleared)
        context.events.weights_loaded.subscribe(self._spent.clear)  # the load replaces the updates
        context.events.before_grads_rescaled.subscribe(self._require_whole_changes)
        context.events.grads_rescaled.subscribe(lambda: self.record_versions() if self._noted else None)

    @torch.no_grad()
    def record_versions(self) -> None:
        """Note all gradients and their versions at the end of a backward."""
        # Now, not when they are used: the update clears `grad` after the event.
        self._spent.update(filter(self._is_spent, self._used))
        self._noted = {
            each: _RecordedVersion.from_gradient(gradient)
            for each in (*self._resident, *self._offloaded)
            if (gradient := each.grad) is not None
        }

    @property
    def are_used(self) -> bool:
        """True if an update inside this step's backward has used, and freed, a gradient."""
        return any(map(self._is_spent, self._used))

    @spent_as_none()
    def _is_spent(self, parameter: nn.Parameter) -> bool:
        return self._context.placement.optimizer_param(parameter).grad is None

    def forget(self) -> None:
        """Drop the noted versions: a step ends, or a backward has raised and the user clears gradients."""
        self._noted = {}
        self._used.clear()
        self._spent.clear()
        self._n_cleared = 0

    def require_unchanged(self) -> None:
        """Check that gradients are those of the last backward.

        Raises:
            ApplyError: Gradients were changed, replaced or freed.
        """
        if self._n_cleared:
            raise ApplyError(
                f"{self._n_cleared} gradients were cleared that an update inside backward had used.",
                evidence="Clearing them cannot undo the update; Tuned.micro_batch(last=True) had allowed it.",
                fix="Tuned.micro_batch(last=False), after which optimizer.step() updates all",
                code="MT364",
            )
        changed, n_resident, is_freed = self._changes()
        if is_freed:
            # The next backward would add to the host sums of this one.
            raise ApplyError(
                f"{n_resident} gradients were freed after a backward, and optimizer.step() has not used"
                " them.",
                evidence=(
                    f"They are those on the device; {len(self._noted) - n_resident} others are offloaded"
                    " and still exist."
                ),
                fix="optimizer.zero_grad() or model.zero_grad()  instead of  parameter.grad = None",
                code="MT364",
            )
        held = [each for each in self._offloaded if own_grad(each) is not None]  # in every step
        replaced = [each for each in held if isinstance(each, OptimizerParameter) and each.is_replaced]
        if replaced:
            raise ApplyError(
                f"{len(replaced)} gradients were assigned after a backward whose own are offloaded.",
                evidence=(
                    f"One has the shape {tuple(replaced[0].shape)}; which of the two the step should use is"
                    " ambiguous."
                ),
                fix="change the gradients of the parameters in optimizer.param_groups, which the step uses",
                code="MT364",
            )
        self._require_all(changed, n_resident)

    def _changes(self) -> tuple[list[nn.Parameter], int, bool]:
        """Return the gradients with new versions, how many are on the device, and whether all were freed."""
        now = [(each, each.grad) for each in self._noted]
        changed = [
            each for each, gradient in now if gradient is not None and not self._noted[each].is_left(gradient)
        ]
        # The common case, in every step: no more lists are made.
        if not changed and all(gradient is not None for _, gradient in now):
            return [], 0, False
        resident = [each for each in self._resident if each in self._noted]
        return changed, len(resident), bool(resident) and all(each.grad is None for each in resident)

    def _require_whole_changes(self) -> None:
        """Check that no part of the gradients was changed, before a clip changes all of them."""
        changed, n_resident, _ = self._changes()
        self._require_all(changed, n_resident)

    def _require_all(self, changed: list[nn.Parameter], n_resident: int) -> None:
        if changed and not self._are_all(changed):
            raise refusals.error_of(
                refusals.gradients_changed(self._fix),
                f"{len(changed)} were; {len(self._noted) - n_resident} are offloaded by then and"
                f" {n_resident} are on the device, so neither are all.",
            )

    def _are_all(self, changed: list[nn.Parameter]) -> bool:
        """Return True if every gradient was changed, as by clipping through `optimizer.param_groups`."""
        # False on several ranks, where clipping would need a norm over all of them. A gradient that
        # an update inside backward has used can no longer be scaled together with the rest.
        # A gradient that an update inside backward has used can no longer be scaled together with the rest.
        count = sum(each.grad is not None for each in self._noted)
        return self._context.placement.world_size == 1 and not self.are_used and len(changed) == count

    def _cleared(self, parameters: Iterable[nn.Parameter]) -> None:
        for each in parameters if self._noted or self._spent else ():
            self._noted.pop(each, None)
            self._n_cleared += each in self._spent


class SentinelGradient:
    """The gradient of `parameter`, resident until the step, that reveals changes of gradients after backward.

    Any scaling of gradients (clipping by norm, a loss scaler) changes it as well. If the parameter took no
    part in a step (a skipped layer, an expert without tokens), zeros are its placeholder until the
    optimizer's step begins.

    Args:
        parameter: Its gradient is not offloaded.
        use_placeholder: Use a placeholder; otherwise a step in which the parameter took no part counts as
            changed.
    """

    def __init__(self, parameter: nn.Parameter, *, use_placeholder: bool = True) -> None:
        self.parameter, self._use_placeholder = parameter, use_placeholder
        self._is_noted, self._noted = False, _NONE
        self._zeros: Tensor | None = None

    def on_grad_ready(self) -> None:
        """Keep the gradient that autograd has set, or added to the placeholder."""
        zeros, self._zeros = self._zeros, None
        if zeros is not None:
            del zeros._is_placeholder  # type: ignore[attr-defined]

    @property
    def has_placeholder(self) -> bool:
        """True while zeros replace a missing gradient."""
        return self._zeros is not None

    @torch.no_grad()
    def record_version(self) -> None:
        """Note the version at the end of a backward; later changes of the gradient are detected."""
        # Zeros are a neutral element: autograd adds to them, and a norm over all gradients is unchanged.
        if self.parameter.grad is None and self._use_placeholder:
            self._zeros = self.parameter.grad = torch.zeros_like(self.parameter)
            self._zeros._is_placeholder = True  # type: ignore[attr-defined]
        gradient = self.parameter.grad
        self._is_noted = True
        self._noted = _NONE if gradient is None else _RecordedVersion.from_gradient(gradient)

    def forget(self) -> None:
        """Drop the noted version: its step does not continue."""
        self._is_noted = False

    def changed(self) -> bool:
        """Return True if the gradient has changed since `note`; drop that version and the placeholder."""
        was_noted, self._is_noted = self._is_noted, False
        gradient = self.parameter.grad
        # Before the optimizer sees it: a gradient of zeros still moves a weight by momentum and decay.
        self.remove_placeholder()
        return was_noted and (gradient is None or not self._noted.is_left(gradient))

    def remove_placeholder(self) -> None:
        """Remove the placeholder, so that the optimizer does not see it."""
        zeros, self._zeros = self._zeros, None
        if zeros is not None and self.parameter.grad is zeros:
            self.parameter.grad = None


def has_gradient(parameter: nn.Parameter) -> bool:
    """Return whether `parameter` has, or shows, a gradient that is no placeholder."""
    return parameter.grad is not None and not hasattr(parameter.grad, "_is_placeholder")


def watch_loads(
    context: Context,
    with_copy: set[nn.Parameter],
    on_loaded: Callable[[list[nn.Parameter]], None],
    before: Callable[[], None] | None = None,
) -> None:
    """Call `on_loaded` with those of `with_copy` whose module has loaded new weights.

    Args:
        context: Hooks are registered on its model's modules; a parameter includes its replacement (this
            rank's rows).
        with_copy: Parameters with a copy on another tier.
        on_loaded: Called after each module's load, children before parents.
        before: Called before each module's load.
    """
    # A copied or pickled model has no such hooks.
    for module in context.model.modules():
        chains = (
            context.placement.param_chain(each) for each in module._parameters.values() if each is not None
        )
        # Of each parameter and its replacements the first that has a copy.
        mine = [first for chain in chains for first in [each for each in chain if each in with_copy][:1]]
        if not mine:
            continue
        if before is not None:
            module.register_load_state_dict_pre_hook(UncopiedHook(before))
        # On each module, since a submodule may be loaded alone.
        module.register_load_state_dict_post_hook(UncopiedHook(partial(on_loaded, mine)))


class ExternalWrites:
    """Finds weights on the device that user code has written since the optimizer wrote them.

    Args:
        context: Context of the model; aliases by its parameters' `data` are tracked, and `weights_gathered`
            is subscribed to.
        weights: The optimizer's weights on the device: the model's parameters, or this rank's rows of them.
    """

    def __init__(self, context: Context, weights: Iterable[nn.Parameter]) -> None:
        model = set(context.model.parameters())
        full = {rows: each for each, rows in context.placement.optimizer_params.items() if each in model}
        # User code writes the model's parameter, whose version counts for the rows.
        mine = {each: each if each in model else full.get(each) for each in weights}
        real = {
            each: of
            for each, of in mine.items()
            if of is not None and not isinstance(memory_of(of), FakeTensor)
        }
        for of in real.values():
            track_data(of)
            context.undo.callback(untrack_data, of)
        self._shards = [place for place, of in enumerate(real.values()) if isinstance(of, DTensor)]
        self._weights, self._of = list(real), list(real.values())
        self._place = {id(each): place for place, each in enumerate(self._weights)}
        self._seen = self._versions()
        context.events.weights_gathered.subscribe(self._gathered)

    def _versions(self) -> _Versions:
        """Return the versions of all weights; every step compares them."""
        more: dict[int, tuple[int, ...]] = {}
        with torch._C.DisableTorchFunctionSubclass():
            own = [of._version for of in self._of]
        if is_data_used() or self._shards:
            # In-place writes through an alias by `data`, and those of a shard's local tensor, do not count in
            # the parameter's own version.
            rows = {place: self._of[place]._local_tensor._version for place in self._shards}  # type: ignore[attr-defined]
            for place, of in enumerate(self._of):
                more[place] = *version_of_data(of), rows.get(place, 0)
            more = {place: each for place, each in more.items() if any(each)}
        return own, more

    def _gathered(self) -> None:
        """Note the all-gather after a step, which writes the full parameters of sharded weights."""
        self.note_writes([each for each, of in zip(self._weights, self._of, strict=True) if each is not of])

    def note_write(self, weight: nn.Parameter) -> None:
        """Note that memtune has written `weight`: the optimizer, or a load."""
        self.note_writes([weight])

    def note_writes(self, weights: Sequence[nn.Parameter]) -> None:
        """Note that memtune has written `weights`."""
        own, more = self._versions()
        if len(weights) >= len(self._weights):
            self._seen = own, more
            return
        for each in weights:
            place = self._place.get(id(each))
            if place is not None:
                self._seen[0][place] = own[place]
                self._seen[1].pop(place, None)
                if place in more:
                    self._seen[1][place] = more[place]

    def ignore_rows(self, weights: Iterable[nn.Parameter]) -> None:
        """Count only writes to these weights themselves, not to the rows of a shard, whose memory changes."""
        left = {id(each) for each in weights}
        self._shards = [place for place in self._shards if id(self._of[place]) not in left]
        self._seen = self._versions()

    def take_external(self) -> list[nn.Parameter]:
        """Return the weights that user code has written since the last `note_write`, each once."""
        # In every step: two lists of numbers are compared before any weight is looked at.
        now, before = self._versions(), self._seen
        if now == before:
            return []
        self._seen = now
        return [
            weight
            for place, weight in enumerate(self._weights)
            if now[0][place] != before[0][place] or now[1].get(place) != before[1].get(place)
        ]


_Versions = tuple[list[int], dict[int, tuple[int, ...]]]
"""Versions by place; by place of those with other writes, the numbers of these."""
