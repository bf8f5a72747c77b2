"""`GradScaler` beside an optimizer that is elsewhere: it unscales all gradients, wherever they are, or says why it cannot.

Three rules:

Rule 1. What is unscaled is each trained parameter's gradient and that of everything the optimizer holds in its place, each once:
        one that is on the device and one that has left it. Where ranks hold other rows, all of them find what one finds.
Rule 2. A parameter whose gradient was used inside backward was updated with the scaled one: refused, as are gradients on SSD.
Rule 3. A step that the scaler, or the user, skips leaves gradients where they are; `zero_grad` of the optimizer and of the model
        lets go of all of them, as in any training loop, and that of a part of the model of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.held_parameter import held_chain
from memtune.runtime.own_step import before_step
from memtune.runtime.tiers import SSD, tier_of
from memtune.runtime.tree import local

_FIX = (
    "forward and backward outside of Tuned.micro_batch; or offload: {states: {kind: optimizer_cpu}}; or bfloat16 without a scaler"
)
_GRADIENTS = "_memtune_gradients"


class Gradients:
    """The gradients of a step of `context`'s optimizer, wherever they are.

    Args:
        context: After everything that moves them has been applied.
    """

    def __init__(self, context: Context) -> None:
        self._ranks, self._device = context.ranks, context.device
        trained = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
        self._chains = {parameter: held_chain(context, parameter) for parameter in trained}
        self._used: set[nn.Parameter] = set()  # inside backward
        held = {chain[-1]: parameter for parameter, chain in self._chains.items()}
        held |= {each: parameter for parameter, chain in self._chains.items() for each in chain}
        context.before_use.append(lambda parameter, _: self._used.add(held.get(parameter, parameter)))
        before_step(context.optimizer, lambda *_: self._used.clear())
        self._own_zero_grad, self._cleared = context.optimizer.zero_grad, context.cleared

    def all(self) -> list[Tensor]:
        """Rule 1.

        Raises:
            ApplyError: Rule 2.
        """
        found: dict[tuple[int, int], Tensor] = {}
        for chain in self._chains.values():
            for each in chain:
                if each.grad is not None:
                    gradient = local(each.grad)
                    found[gradient.data_ptr(), gradient.numel()] = gradient
        gone = [p for p in self._used if all(each.grad is None for each in self._chains.get(p, [p]))]
        if gone:
            raise ApplyError(
                "GradScaler cannot unscale gradients that have been used.",
                evidence=f"{len(gone)} parameters were updated inside backward, with gradients that were still scaled.",
                fix=_FIX, code="MT364",
            )  # fmt: skip
        if any(tier_of(each) == SSD for each in found.values()):
            raise ApplyError("GradScaler cannot unscale gradients that are on SSD.", fix=_FIX, code="MT364")
        return list(found.values())

    @torch.no_grad()
    def unscale(self, inverse: Tensor, found_inf: Tensor) -> dict[torch.device, Tensor]:
        """Multiply all by `inverse`, a scalar; returns by device whether one was not finite (1.0, else 0.0)."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in self.all():
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        found: dict[torch.device, Tensor] = {found_inf.device: found_inf}
        for (device, _), gradients in by_kind.items():
            here = found.setdefault(device, torch.zeros_like(found_inf, device=device))
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, inverse.to(device))
        if self._ranks > 1:
            together = torch.stack([each.to(self._device) for each in found.values()]).sum()
            world = dist.group.WORLD
            assert world is not None
            torch.ops.memtune.all_reduce_(together, world.group_name, self._ranks, "sum")
            found_inf.copy_(together.clamp_(max=1.0))
        return found

    def zero(self, set_to_none: bool = True) -> None:
        """Rule 3."""
        self._used.clear()
        self._own_zero_grad(set_to_none)
        self.zero_of(self._chains, set_to_none)

    def zero_of(self, parameters: Iterable[nn.Parameter], set_to_none: bool) -> None:
        """Rule 3, of these parameters of the model."""
        every = [each for parameter in parameters for each in self._chains.get(parameter, ())]
        self._used.difference_update(every)
        for each in every:
            if each.grad is not None and (set_to_none or tier_of(each.grad) == SSD):
                each.grad = None
            elif each.grad is not None:
                each.grad.detach_().zero_()
        for cleared in self._cleared:
            cleared(every)


def unscale_everywhere(context: Context) -> None:
    """From here on a `GradScaler` that is given the optimizer of `context` finds all gradients, by the rules above."""
    gradients = Gradients(context)
    optimizer: Any = context.optimizer

    def zero_grad(self: Optimizer, set_to_none: bool = True) -> None:
        gradients.zero(set_to_none)

    optimizer.zero_grad = MethodType(functools.wraps(type(optimizer).zero_grad)(zero_grad), optimizer)
    for module in {*context.model.modules(), *([] if context.runner is None else [context.runner])}:
        vars(module)["zero_grad"] = _ZeroGrad(module, gradients)
    optimizer._step_supports_amp_scaling = False  # a fused step would unscale what the optimizer itself updates, and that alone
    vars(optimizer)[_GRADIENTS] = gradients
    for scaler in (GradScaler, ShardedGradScaler):
        _tell(scaler)


class _ZeroGrad:
    """`zero_grad` of a module; a copy of the module, or one that has been pickled, has its class's own."""

    def __init__(self, module: nn.Module, gradients: Gradients) -> None:
        self._module, self._gradients = module, gradients

    def __call__(self, set_to_none: bool = True) -> None:
        type(self._module).zero_grad(self._module, set_to_none)
        self._gradients.zero_of(self._module.parameters(), set_to_none)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "zero_grad")


def _tell(scaler: Any) -> None:
    """A scaler asks no optimizer for its gradients: it looks into the groups itself, in this one method."""
    own = scaler._unscale_grads_
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def unscale(self: Any, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *allowed: Any, **named: Any) -> Any:
        gradients: Gradients | None = getattr(optimizer, _GRADIENTS, None)
        if gradients is None:
            return own(self, optimizer, inv_scale, found_inf, *allowed, **named)
        return gradients.unscale(inv_scale, found_inf)

    scaler._unscale_grads_ = unscale
