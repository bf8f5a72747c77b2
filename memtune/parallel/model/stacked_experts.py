"""A module whose weights are stacked by expert, (experts, …), called with the weights of some of them.

It is called with tokens, the experts that each is routed to, and their weights: (T, H), (T, K), (T, K), and
returns (T, H), as in nearly all models of Transformers 5; or with rows sorted by expert and the number of
each expert's: (R, H), (E), and returns (R, H), as in torchtitan. Its own forward runs with the weights of
some experts for rows that have chosen one of these, one expert a row.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memtune.errors import ApplyError
from memtune.parallel.model.expert_dispatch import unused
from memtune.runtime import ForwardWrapper


class StackedExperts(ABC):
    """A module of stacked experts; replaces its forward.

    Args:
        module: The module.
        name: Its name.
        experts: Number of its experts.
        way: Name of what needs the forms of call above, for errors.
    """

    def __init__(self, module: nn.Module, name: str, experts: int, way: str) -> None:
        self.module, self.name, self.experts, self._way = module, name, experts, way
        self._forward = module.forward
        self._names = tuple(inspect.signature(module.forward).parameters)
        module.forward = ForwardWrapper(self._run, module.forward)

    def _run(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the outputs of this rank's tokens or rows."""
        given = (*args, *(kwargs[name] for name in self._names[len(args) :]))
        if len(given) == 3:
            x, index, weights = given
            if index.shape != weights.shape or index.dim() != 2 or x.shape[:-1] != index.shape[:1]:
                raise self._other_tensors(*given)
            return self.run_routed(x, index, weights)
        x, counts = given
        if counts.shape != (self.experts,):
            raise self._other_tensors(*given)
        # Rows of no expert, as some kernels need for alignment, would count as rows of a wrong one.
        torch._assert_async(counts.sum() == len(x))
        experts = torch.arange(self.experts, device=x.device)
        index = torch.repeat_interleave(experts, counts.to(torch.int64), output_size=len(x))
        return self.run_sorted(x, index, counts.dtype)

    @abstractmethod
    def run_routed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs of tokens (T, H) for their experts and the weights of these, (T, K)."""

    @abstractmethod
    def run_sorted(self, x: Tensor, index: Tensor, kind: torch.dtype) -> Tensor:
        """Return the outputs of rows (R, H) for the expert of each; numbers of rows have type `kind`."""

    def run_with(
        self,
        weights: dict[str, Tensor],
        n_experts: int,
        rows: Tensor,
        experts: Tensor,
        other: Tensor | torch.dtype,
    ) -> Tensor:
        """Return the outputs of rows of `n_experts` experts, whose weights are given.

        Args:
            weights: By name in the module.
            n_experts: Number of their experts.
            rows: (R, H).
            experts: (R), the expert of each row, counted from the first of these.
            other: (R), the weight of each row, or the type of the numbers of rows.
        """
        if isinstance(other, Tensor):
            return self._call(weights, n_experts, rows, experts.unsqueeze(1), other.unsqueeze(1))
        order = torch.argsort(experts, stable=True)
        counts = torch.zeros(n_experts, dtype=torch.int64, device=rows.device)
        counts = counts.scatter_add(0, experts, torch.ones_like(experts)).to(other)
        made = self._call(weights, n_experts, rows.index_select(0, order), counts)
        return made.index_select(0, torch.argsort(order))

    def _call(self, weights: dict[str, Tensor], n_experts: int, rows: Tensor, *others: Tensor) -> Tensor:
        with self._holding(weights, n_experts):
            if len(rows):
                made: Tensor = self._forward(rows, *others)
            else:
                inputs = [each for each in (rows, *others, *weights.values()) if each.is_floating_point()]
                made = unused(*inputs)
        return made

    def _other_tensors(self, *given: Tensor) -> ApplyError:
        shapes = ", ".join(str(tuple(each.shape)) for each in given)
        return ApplyError(
            f"{self.name} is called with other tensors than {self._way} knows: {shapes}.",
            evidence="It takes (tokens, features), (tokens, chosen), (tokens, chosen), or (rows, features)"
            " and the number of rows of each expert.",
            fix="parallel: {kind: none}",
            code="MT390",
        )

    @contextmanager
    def _holding(self, weights: dict[str, Tensor], n_experts: int) -> Iterator[None]:
        """Give the module these weights, and their number where it has a number of experts."""
        whole = {name: weight for name, weight in self.module._parameters.items() if weight is not None}
        numbers = _numbers(self.module, self.experts)
        self.module._parameters.update(weights)  # type: ignore[arg-type]
        vars(self.module).update(dict.fromkeys(numbers, n_experts))
        try:
            yield
        finally:
            self.module._parameters.update(whole)
            vars(self.module).update(dict.fromkeys(numbers, self.experts))


def _numbers(module: nn.Module, experts: int) -> list[str]:
    """Return the attributes of `module` that hold its number of experts."""
    return [name for name, value in vars(module).items() if "expert" in name and value == experts]


def stack_refusal(module: nn.Module, degree: int, owners: dict[int, list[str]]) -> str:
    """Return why the experts of `module` cannot be divided over `degree` ranks, or an empty string.

    Args:
        module: A module with weights of its own.
        degree: Number of ranks.
        owners: All names of each parameter, by identity.
    """
    mine = [each for each in module._parameters.values() if each is not None]
    if any(each._parameters for each in module.modules() if each is not module):
        return "has weights in modules of its own, of which an owner would need a share"
    rows = {each.shape[:1] for each in mine}
    if len(rows) > 1 or any(each.dim() < 2 for each in mine):
        return "has weights that are not all of (experts, …)"
    if module._buffers:
        return "has buffers, of which an owner would need a share"
    experts = mine[0].shape[0]
    if experts % degree:
        return f"has {experts} experts, which {degree} ranks do not divide"
    if not _takes_tokens(module.forward):
        return (
            "takes neither tokens, the experts of each and their weights, nor rows and num_tokens_per_expert"
        )
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return "has hooks or a forward of its own"
    return shared_weight(module, owners)


def shared_weight(module: nn.Module, owners: dict[int, list[str]]) -> str:
    """Return the names of a weight of `module` that has several, or an empty string."""
    shared = next((owners[id(each)] for each in module.parameters() if len(owners[id(each)]) > 1), None)
    return f"shares its weight: {' and '.join(shared)}" if shared else ""


def is_named_experts(name: str, module: nn.Module) -> bool:
    """Return True if the name or the type of `module` says that it has experts."""
    return "expert" in f"{name.rpartition('.')[2]} {type(module).__name__}".lower()


def _takes_tokens(forward: Callable[..., Any]) -> bool:
    names = list(inspect.signature(forward).parameters)
    routed = len(names) == 3 and ("ind" in names[1] or "idx" in names[1]) and "weight" in names[2]
    return routed or (len(names) == 2 and "tokens_per_expert" in names[1])
