"""torch's `clip_grad_norm_` and `clip_grad_value_` where gradients are offloaded before the step.

They read `.grad` of the model's parameters, which is None once a gradient is on the host. Given parameters of
a model that trains under memtune, they clip the gradients that the step will use, on every tier; on several
ranks the norm is that of the full model.

The functions are replaced inside torch's own wrapper of them, so that a trainer that imported them before
calls the same.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from memtune.offload.gradients.grad_scaler import Gradients
from memtune.runtime import Context, local, spent_as_none

_OWNERS: weakref.WeakSet[ClippedGradients] = weakref.WeakSet()
"""Those of all trainings. Not by parameter: `module.to` swaps no tensor that has a weak reference."""


class ClippedGradients:
    """The gradients of `context`'s model as the functions that clip see them.

    Args:
        context: After all techniques that move gradients have been applied.
        gradients: Its gradients on every tier.
    """

    def __init__(self, context: Context, gradients: Gradients) -> None:
        placement = context.placement
        self._gradients, self._device, self._ranks = gradients, context.device, placement.world_size
        self._before, self._rescaled = context.events.before_grads_rescaled, context.events.grads_rescaled
        self._effects = placement.offload
        trained = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
        chains = [placement.param_chain(parameter) for parameter in trained]
        self.chains = {each: chain for chain in chains for each in chain}
        """By each parameter of a chain: the model's, its replacements, the optimizer's."""

    @spent_as_none()
    def clip_norm(
        self, given: Sequence[Any], own: Callable[..., Tensor], max_norm: float, order: float, **how: Any
    ) -> Tensor:
        """Clip the gradients of the parameters `given` by their norm; return the norm before."""
        held = self._held(given)
        if self._ranks == 1:
            total = own(held, max_norm, order, **how)
        elif not self._effects.follows_calls:
            return own(given, max_norm, order, **how)  # on the device until the step
        else:
            total = self._norm_over_ranks(held, order)
            if how.get("error_if_nonfinite") and not math.isfinite(float(total)):
                raise RuntimeError(f"The total norm of order {order} of the gradients is non-finite.")
            # As in torch, with its epsilon.
            factor = float((max_norm / (total + 1e-6)).clamp(max=1.0))
            for each in held:
                if each.grad is not None:
                    each.grad.mul_(factor)  # not its local rows, whose changes are not counted
        self._note(given, held)
        return total.to(self._device)

    @spent_as_none()
    def clip_value(self, given: Sequence[Any], own: Callable[..., None], limit: float, **how: Any) -> None:
        """Clip each element of the gradients of the parameters `given`."""
        held = self._held(given)
        own(held, limit, **how)
        self._note(given, held)

    def _held(self, given: Sequence[Any]) -> list[Any]:
        """Return the parameters whose gradients the step uses for those of `given`.

        Raises:
            ApplyError: A gradient was used in backward.
        """
        chains = [self.chains.get(each, [each]) for each in given]
        self._gradients.require_unused([chain[0] for chain in chains], "clip")
        self._before.emit()
        return [
            next((each for each in reversed(chain) if each.grad is not None), chain[0]) for chain in chains
        ]

    def _note(self, given: Sequence[Any], held: Sequence[Any]) -> None:
        """Report that gradients were changed on purpose."""
        # A list of those parameters alone whose gradients are on the device lacks the others: that is
        # reported by the step, not hidden here.
        of_model = [self.chains.get(each, [each])[0].grad for each in given]
        if any(mine is None and each.grad is not None for mine, each in zip(of_model, held, strict=True)):
            self._rescaled.emit()

    def _norm_over_ranks(self, held: Sequence[Any], order: float) -> Tensor:
        """Return the norm of the full model's gradients; collective."""
        # Each rank adds the norms of its parts, divided by the number of ranks that hold the same.
        norms = [torch.zeros((), device=self._device)]
        for each in held:
            if each.grad is not None:
                norm = torch.linalg.vector_norm(local(each.grad).float(), order).to(self._device)
                # Replicated gradients count once in the full model's norm.
                copies = self._ranks / self._parts(each)
                norms.append(norm if math.isinf(order) else norm**order / copies)
        both = torch.stack(norms)
        total = both.max() if math.isinf(order) else both.sum()
        dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM)
        return total if math.isinf(order) else total ** (1 / order)

    def _parts(self, parameter: Any) -> int:
        """Return the number of parts into which the gradient of `parameter` is divided."""
        chain = self.chains.get(parameter, [parameter])
        for each in chain:
            if isinstance(each, DTensor):
                mesh = each.device_mesh
                return math.prod(mesh.size(i) for i, how in enumerate(each.placements) if how.is_shard())
        return self._ranks if any(each.numel() != chain[0].numel() for each in chain) else 1


def clip_everywhere(context: Context, gradients: Gradients) -> None:
    """Have torch's functions that clip gradients find all of the model in `context` from here on."""
    if context.placement.remote_parameters is not None:
        return  # a pipeline shows the norms of other stages itself
    clipped: Any = ClippedGradients(context, gradients)
    vars(context.optimizer)["_memtune_clipping"] = clipped  # keeps it alive
    _OWNERS.add(clipped)
    _replace(clip_grad.clip_grad_norm_, _clip_grad_norm)
    _replace(clip_grad.clip_grad_value_, _clip_grad_value)


def _owner_of(parameters: Sequence[Any]) -> ClippedGradients | None:
    """Return the training that one of `parameters` belongs to; None if none does."""
    tensors = [each for each in parameters if isinstance(each, Tensor)]
    return next((owner for owner in _OWNERS if any(each in owner.chains for each in tensors)), None)


def _clip_grad_norm(
    own: Callable[..., Tensor],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    **how: Any,
) -> Tensor:
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    owner = _owner_of(given)
    if owner is None:  # an exhausted generator has torch's own warning
        return own(given or parameters, max_norm, norm_type, **how)
    return owner.clip_norm(given, own, float(max_norm), float(norm_type), **how)


def _clip_grad_value(
    own: Callable[..., None], parameters: Tensor | Iterable[Tensor], clip_value: float, **how: Any
) -> None:
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    owner = _owner_of(given)
    if owner is None:
        return own(given, clip_value, **how)
    return owner.clip_value(given, own, float(clip_value), **how)


def _replace(function: Any, ours: Callable[..., Any]) -> None:
    """Replace the function inside torch's `no_grad` wrapper `function`, once."""
    assert isinstance(function, FunctionType)
    # In the closure of torch's wrapper: modules that imported the function before hold that wrapper.
    cell = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))["func"]
    own = cell.cell_contents
    if not isinstance(own, functools.partial):
        cell.cell_contents = functools.partial(ours, own)
