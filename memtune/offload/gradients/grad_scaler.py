"""`GradScaler` support for an offloaded optimizer: unscale all gradients, on the device and on the host.

A scaler unscales the gradients that it finds in the optimizer's groups. Here it unscales, once each, the
gradient of every trained parameter and of every parameter that the optimizer has instead. Where ranks hold
different rows, a non-finite value on one rank counts on all.

A step that the scaler or the user skips keeps gradients; `zero_grad` of the optimizer, the model or a
submodule frees those that are offloaded as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.offload.gradients.version_checks import has_gradient
from memtune.runtime import SSD, Context, before_step, local, spent_as_none, tier, tier_of

_FIX = "forward and backward outside of Tuned.micro_batch; or offload: {states: {kind: optimizer_cpu}}"
_GRADIENTS = "_memtune_gradients"


class Gradients:
    """The gradients of a step of `context`'s optimizer, on every tier.

    Args:
        context: After all techniques that move gradients have been applied.
    """

    def __init__(self, context: Context) -> None:
        self._ranks, self._device = context.placement.world_size, context.device
        trained = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
        self._chains = {parameter: context.placement.param_chain(parameter) for parameter in trained}
        self._every = [each for chain in self._chains.values() for each in chain]
        in_groups = {id(each) for group in context.optimizer.param_groups for each in group["params"]}
        self._others = [each for each in self._every if id(each) not in in_groups]
        self._used: set[nn.Parameter] = set()  # inside backward
        held = {chain[-1]: parameter for parameter, chain in self._chains.items()}
        held |= {each: parameter for parameter, chain in self._chains.items() for each in chain}
        context.events.before_grad_use.subscribe(
            lambda parameter, _: self._used.add(held.get(parameter, parameter))
        )
        self._with_grad: set[nn.Parameter] | None = None
        """Those that had a gradient when the step began; of the first step until gradients are zeroed."""
        self._zeroed: set[nn.Parameter] | None = None
        """Those whose gradients are zeros in plain PyTorch, unless backward adds to them; None: there is no
        `zero_grad(set_to_none=False)` in the loop.
        """
        before_step(context.optimizer, lambda *_: self._step_begins())
        self._own_zero_grad, self._grads_cleared = context.optimizer.zero_grad, context.events.grads_cleared

    @spent_as_none()
    def all(self) -> list[Tensor]:
        """Return all gradients of the step, each once.

        Raises:
            ApplyError: A gradient was used inside backward, still scaled.
        """
        self.require_unused(self._chains, "unscale")
        found: dict[tuple[int, int], Tensor] = {}
        # By address: the model's parameter and its replacement may show the same gradient, which must be
        # unscaled once.
        for chain in self._chains.values():
            for each in chain:
                if each.grad is not None:
                    gradient = local(each.grad)
                    found[gradient.data_ptr(), gradient.numel()] = gradient
        return list(found.values())

    @spent_as_none()
    def require_unused(self, parameters: Iterable[nn.Parameter], verb: Literal["unscale", "clip"]) -> None:
        """Require that the step can still use changed gradients of these model parameters.

        Raises:
            ApplyError: A gradient was used inside backward.
        """
        what, without = (
            ("GradScaler cannot unscale", "bfloat16 without a scaler")
            if verb == "unscale"
            else ("clipping cannot change", "no clipping")
        )
        chains = [self._chains.get(each, [each]) for each in parameters]
        gone = [chain for chain in chains if chain[0] in self._used and not any(map(has_gradient, chain))]
        if gone:
            raise ApplyError(
                f"{what} gradients that have been used.",
                evidence=f"{len(gone)} parameters were updated inside backward, from gradients as they were.",
                fix=f"{_FIX}; or {without}",
                code="MT364",
            )

    @torch.no_grad()
    def unscale(self, inverse: Tensor, found_inf: Tensor) -> dict[torch.device, Tensor]:
        """Multiply all gradients by `inverse`, a scalar; return by device 1.0 if one was not finite."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in self.all():
            # The foreach kernel takes tensors of one device and one type.
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found: dict[torch.device, Tensor] = {found_inf.device: found_inf}
        for (device, _), gradients in by_kind.items():
            here = found.setdefault(device, torch.zeros_like(found_inf, device=device))
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, inverse.to(device))
        # Each rank sees its own rows. If one skipped its step and others did not, weights would differ from
        # here on.
        if self._ranks > 1:
            together = torch.stack([each.to(self._device) for each in found.values()]).sum()
            world = dist.group.WORLD
            assert world is not None
            torch.ops.memtune.all_reduce_(together, world.group_name, self._ranks, "sum")
            found_inf.copy_(together.clamp_(max=1.0))
        return found

    @spent_as_none()
    def _step_begins(self) -> None:
        if self._with_grad is None or self._zeroed is not None:
            chains = self._chains.items()
            had = {each for each, chain in chains if each in self._used or any(map(has_gradient, chain))}
            for each in (self._zeroed or set()) - had:
                # Momentum and weight decay go on, as for a gradient that the step has not freed.
                held = self._chains[each][-1]
                with tier(tier_of(held)):
                    held.grad = torch.zeros_like(held)
            self._with_grad = had
        self._used.clear()

    @spent_as_none()
    def zero(self, set_to_none: bool = True) -> None:
        """Clear the optimizer's gradients and all offloaded ones, as `Optimizer.zero_grad` does."""
        self._note_zeroed(self._chains, set_to_none)
        self._used.clear()
        self._own_zero_grad(set_to_none)
        # `None` has replaced the gradients of the optimizer's own parameters.
        self._clear(self._others if set_to_none else self._every, set_to_none, self._every)

    @spent_as_none()
    def zero_of(self, parameters: Iterable[nn.Parameter], set_to_none: bool) -> None:
        """Clear the gradients of these model parameters and of their replacements."""
        parameters = [each for each in parameters if each in self._chains]
        self._note_zeroed(parameters, set_to_none)
        every = [each for parameter in parameters for each in self._chains[parameter]]
        self._used.difference_update(every)
        self._clear(every, set_to_none, every)

    def _note_zeroed(self, parameters: Iterable[nn.Parameter], set_to_none: bool) -> None:
        if not set_to_none:
            self._zeroed = (self._zeroed or set()) | (self._with_grad or set()).intersection(parameters)
        elif self._zeroed:
            self._zeroed.difference_update(parameters)

    def _clear(self, left: list[nn.Parameter], set_to_none: bool, every: list[nn.Parameter]) -> None:
        """Clear the gradients of `left`, and report those of `every` as cleared."""
        # A gradient on SSD that is shown is written again with its checksum; another one is dropped.
        seen = () if set_to_none else [each.grad for each in self._chains if each.grad is not None]
        shown = {local(each).data_ptr() for each in seen}
        for each in left:
            gradient = each.grad
            if gradient is not None and (
                set_to_none or (tier_of(gradient) == SSD and local(gradient).data_ptr() not in shown)
            ):
                each.grad = None
            elif gradient is not None:
                # As torch does: a gradient that is a view, as of `torch.autograd.grad`, has no `detach_`.
                if gradient.grad_fn is not None:
                    gradient.detach_()
                gradient.requires_grad_(False).zero_()
        self._grads_cleared.emit(every)


def unscale_everywhere(context: Context) -> Gradients:
    """Make a `GradScaler` of the optimizer find all gradients of `context` from now on; return these."""
    gradients = Gradients(context)
    optimizer: Any = context.optimizer

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        gradients.zero(set_to_none)

    # On the object, not the class: other optimizers of this process keep torch's method.
    optimizer.zero_grad = MethodType(functools.wraps(type(optimizer).zero_grad)(zero_grad), optimizer)
    for module in {*context.model.modules(), *([] if context.loop.runner is None else [context.loop.runner])}:
        vars(module)["zero_grad"] = _ZeroGrad(module, gradients)
    # A fused step would unscale only the gradients that the optimizer itself updates.
    optimizer._step_supports_amp_scaling = False
    vars(optimizer)[_GRADIENTS] = gradients
    for scaler in (GradScaler, ShardedGradScaler):
        _patch_scaler(scaler)
    return gradients


class _ZeroGrad:
    """`zero_grad` of a module; a copied or pickled module gets its class's own method."""

    def __init__(self, module: nn.Module, gradients: Gradients) -> None:
        self._module, self._gradients = module, gradients

    @spent_as_none()
    def __call__(self, set_to_none: bool = True) -> None:
        type(self._module).zero_grad(self._module, set_to_none)
        self._gradients.zero_of(self._module.parameters(), set_to_none)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "zero_grad")


def _patch_scaler(scaler: Any) -> None:
    """Patch `_unscale_grads_` of a scaler class once: a scaler reads the groups itself there."""
    own = scaler._unscale_grads_
    # Once for the class, because users create scalers after `apply`.
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def unscale(
        self: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *allowed: Any, **named: Any
    ) -> Any:
        gradients: Gradients | None = getattr(optimizer, _GRADIENTS, None)
        if gradients is None:
            return own(self, optimizer, inv_scale, found_inf, *allowed, **named)
        return gradients.unscale(inv_scale, found_inf)

    scaler._unscale_grads_ = unscale
