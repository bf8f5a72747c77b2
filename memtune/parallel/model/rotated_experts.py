"""Experts whose weights rotate: every rank calls each expert once a forward, in the order of their list.

A ring needs all ranks at one weight at a time, but a rank calls only the experts that its samples are routed
to. Rules, for each list of experts:

1. Before a rank calls an expert, it runs those that it has skipped on zero tokens, and at the end of the
  module that holds the list it runs the rest. Their shards pass as for any other layer.
2. Their outputs, which are empty, are joined to the module's output. Autograd runs nodes from the last one
  made to the first, so backward visits the experts of a list in the reverse order on every rank.
3. The gradients of an expert that no rank has called since gradients were cleared are removed before the
  optimizer's step: without the ring it would have none, and a zero gradient still decays weights and moments.

Source: Luo et al. 2023 (RTP, arXiv:2311.01635): experts rotate, tokens are not sent to other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from memtune.errors import ApplyError
from memtune.parallel.ranks import missing_indices
from memtune.program import split_expert_name
from memtune.runtime import Context, ForwardWrapper, UncopiedHook, before_step


def expert_refusal(module: nn.Module, expert: nn.Module) -> str:
    """Return why the layer `module` of `expert` cannot rotate, or an empty string.

    Runs the expert on zero tokens, as rule 1 does.
    """
    if not all(each.requires_grad for each in module.parameters(recurse=False)):
        return "is of an expert with frozen weights, whose backward depends on the samples"
    try:
        with torch.no_grad():
            # Tried at apply time, because an error in the middle of a forward would leave other ranks waiting
            # in the ring.
            expert(no_tokens(expert))
    except Exception as error:  # code of the user's, which was not written for no tokens
        return f"is of an expert that does not run on zero tokens ({type(error).__name__})"
    return ""


def expert_of(name: str) -> str:
    """Return the expert that holds the module `name`, or an empty string."""
    split = split_expert_name(f"{name}.weight")
    return "" if split is None else f"{split[0]}.{split[1]}"


class ExpertOrder:
    """The experts of one list, called by each rank in the order of the list (rules 1 and 2).

    Args:
        path: Name of the list.
        holder: The module whose forward calls the experts; its forward is replaced.
        experts: The experts that rotate, in the order of the list.
    """

    def __init__(self, path: str, holder: nn.Module, experts: Sequence[nn.Module]) -> None:
        self.experts, self.called = experts, [False] * len(experts)
        self._path, self._next, self._skipped = path, len(experts), list[Tensor]()
        self._is_open = self._skips = False
        holder.forward = ForwardWrapper(partial(self._run, holder.forward), holder.forward)
        for index, expert in enumerate(experts):
            expert.register_forward_pre_hook(UncopiedHook(partial(self._begins, index)))

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the holder's forward, then the experts that it has not called."""
        # A forward that raised may have left a position: each call begins at the first expert.
        self._next, self._skipped, self._is_open = 0, [], True
        try:
            made = forward(*args, **kwargs)
            self._skip_to(len(self.experts))
        finally:
            self._is_open = False
        skipped, self._skipped = self._skipped, []
        return join(made, [each for each in skipped if each.requires_grad])

    def _begins(self, index: int) -> None:
        """Run the skipped experts before expert `index`; forward pre-hook."""
        # The pre-hook also runs for the zero-token calls of `_skip_to`, which are in order already.
        if self._skips:
            return
        if not self._is_open or index < self._next:
            how = (
                "again, or before an earlier one" if self._is_open else "outside of the module that has them"
            )
            raise ApplyError(
                f"{self._path}.{index} is called {how}.",
                evidence="Weights of experts rotate among ranks in the order of their list, once a forward.",
                fix="parallel: {kind: tensor}, or {kind: none}",
                code="MT391",
            )
        self._skip_to(index)
        self._next = index + 1
        # Without gradients it may be an evaluation; a recomputed forward runs again with them.
        self.called[index] |= torch.is_grad_enabled()

    def _skip_to(self, index: int) -> None:
        self._skips = True
        try:
            for skipped in range(self._next, index):
                self._forget_cleared(skipped)
                self._skipped.append(self.experts[skipped](no_tokens(self.experts[skipped])))
        finally:
            self._skips = False
        if index < len(self.experts):
            self._forget_cleared(index)
        self._next = index

    def _forget_cleared(self, index: int) -> None:
        """Forget that an expert was called if its gradients have been cleared since."""
        if torch.is_grad_enabled() and all(each.grad is None for each in self.experts[index].parameters()):
            self.called[index] = False


def order_experts(model: nn.Module, layers: Sequence[str]) -> list[ExpertOrder]:
    """Have all ranks call the experts that hold some of `layers` in one order; return one object a list."""
    lists: dict[str, dict[int, nn.Module]] = {}
    for expert in dict.fromkeys(filter(None, map(expert_of, layers))):
        path, _, number = expert.rpartition(".")
        lists.setdefault(path, {})[int(number)] = model.get_submodule(expert)
    return [
        ExpertOrder(
            path, model.get_submodule(path.rpartition(".")[0]), [each for _, each in sorted(them.items())]
        )
        for path, them in lists.items()
    ]


def remove_gradients_of_unused(
    context: Context, orders: Sequence[ExpertOrder], ranks: dist.ProcessGroup
) -> None:
    """Remove gradients of experts that no rank has called before each step of the optimizer (rule 3)."""

    def clear(*_: Any) -> None:
        experts = [(order, index) for order in orders for index in range(len(order.experts))]
        here = [order.called[index] for order, index in experts]
        like = next(orders[0].experts[0].parameters())
        # A flag per expert: ranks agree by one small message, instead of one per parameter.
        remote = set(missing_indices(here, ranks, like))
        for at, (order, index) in enumerate(experts):
            if here[at] or at in remote:
                continue
            for parameter in order.experts[index].parameters():
                parameter.grad = None
                # An offloaded or sharded parameter has a second one, whose gradient the optimizer would use.
                context.placement.optimizer_params.get(parameter, parameter).grad = None

    before_step(context.optimizer, clear)


def no_tokens(expert: nn.Module) -> Tensor:
    """Return an empty input of `expert`, (0, features of its first linear layer)."""
    first = next(each for each in expert.modules() if isinstance(each, nn.Linear))
    weight = first._parameters["weight"]
    assert weight is not None
    # Not `new_empty`, which would be recorded as a use of the weight.
    return torch.empty(0, first.in_features, dtype=weight.dtype, device=weight.device)


def join(made: Any, skipped: Sequence[Tensor]) -> Any:
    """Return `made` with its first floating-point tensor depending on the empty tensors `skipped`."""
    if not skipped:
        return made
    leaves, structure = pytree.tree_flatten(made)
    for at, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            # One node that depends on all skipped outputs: autograd then visits them even though the loss
            # does not use them.
            leaves[at] = _Joined.apply(leaf, *skipped)  # type: ignore[no-untyped-call]
            break
    return pytree.tree_unflatten(leaves, structure)


class _Joined(torch.autograd.Function):
    """A copy of a tensor whose backward also runs those of empty tensors (rule 2)."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, *skipped: Tensor) -> Tensor:
        ctx.shapes = [each.shape for each in skipped]
        # A copy, no view: later code may write to it, which autograd refuses for views of this function.
        return made.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *(gradient.new_empty(shape) for shape in ctx.shapes)
