"""Weights that only other ranks of a pipeline hold: what stands in their place here, and how state dicts find them.

A parameter of another stage is one value of as many dimensions, so that optimizers and parameter groups stay as they are; what
it becomes is never used. State dicts leave it out (checkpoints, which each rank writes its part of) or get it from its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _foreach_utils

from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.deferred import keep_only


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """What other ranks hold, by its name in the plain model's state dict; tied weights under each of their names."""

    absent: Mapping[str, torch.Size]
    """Whole shapes of what is not here."""
    owner: Mapping[str, int]
    """The rank of the group that answers for each entry of the state dict."""
    group: dist.ProcessGroup

    def answers(self, name: str) -> bool:
        """Whether this rank says what `name` is."""
        return self.owner[name] == self.group.rank()

    def shape(self, name: str, here: Tensor) -> torch.Size:
        """The whole shape of `name`."""
        return self.absent.get(name, here.shape)

    def whole(self, name: str, here: Any) -> Any:
        """The value of `name` from its owner; all ranks of the group call it in the same order."""
        if not isinstance(here, Tensor):
            return here
        value = here.detach() if self.answers(name) else here.new_empty(self.shape(name, here))
        return self._sent(value.contiguous(), name)

    def states(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """The optimizer's state of `name` from its owner."""
        told: list[Any] = [{what: _form(value) for what, value in state.items()} if self.answers(name) else None]
        dist.broadcast_object_list(told, group=self.group, group_src=self.owner[name])
        found = {}
        for what, form in told[0].items():
            if not isinstance(form, _Form):
                found[what] = form
                continue
            value = state[what].detach().contiguous() if self.answers(name) else form.empty()
            found[what] = self._sent(value, name)
        return found

    def _sent(self, value: Tensor, name: str) -> Tensor:
        dist.broadcast(value, group=self.group, group_src=self.owner[name])
        return value


class NormAlone(Tensor):
    """The gradient of a parameter in the place of another stage's: one value, the 2-norm of the real one, and no more."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As of a plain tensor.

        Raises:
            ApplyError: Another norm is asked for.
        """
        given = kwargs or {}
        if func in _NORMS:
            order = args[1] if len(args) > 1 else given.get("ord", given.get("p", 2))
            if order not in (2, 2.0, None, "fro"):
                raise ApplyError(
                    f"the {order}-norm of gradients is not known on the ranks of a pipeline.",
                    evidence="Of another stage's gradient a rank has the 2-norm alone.",
                    fix="clip by norm_type=2, or parallel: {kind: none}", code="MT398",
                )  # fmt: skip
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)


# As DTensor does: else all gradients would be taken one by one, and those in a list with a DTensor not at all.
_foreach_utils._foreach_supported_types.append(NormAlone)
_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch._foreach_norm, torch.norm, Tensor.norm)


@dataclass(frozen=True)
class _Form:
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _form(value: Any) -> Any:
    return _Form(tuple(value.shape), value.dtype, value.device.type) if isinstance(value, Tensor) else value


def keep_own(
    context: Context, owners: Mapping[str, Sequence[int]], mine: Sequence[int], degree: int, group: dist.ProcessGroup
) -> None:
    """Take the parameters of other stages out of the model and the optimizer of `context`.

    Args:
        context: Changed in place; gets `elsewhere`.
        owners: Entry of the state dict → the stages that hold it, the one that answers for it first.
        mine: Stages of this rank.
        degree: Ranks of the group; stage s is of rank s % degree.
        group: The ranks of this pipeline.
    """
    named = dict(context.model.named_parameters(remove_duplicate=False))
    canonical = {id(p): name for name, p in context.model.named_parameters()}
    owner_of = {name: owners[canonical[id(named[name])] if name in named else name] for name in owners}
    absent = {name for name, stages in owner_of.items() if not set(stages) & set(mine)}
    state = context.model.state_dict(keep_vars=True)
    shapes = {name: state[name].shape for name in absent if isinstance(state[name], Tensor)}
    new_of: dict[nn.Parameter, nn.Parameter] = {}
    for module in context.model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and canonical[id(parameter)] in absent:
                new_of.setdefault(parameter, _in_place_of(parameter))
                module._parameters[name] = new_of[parameter]
    keep_only(context.model, {name: _one_value for name in canonical.values() if name in absent})
    for group_of in context.optimizer.param_groups:
        group_of["params"] = [new_of.get(parameter, parameter) for parameter in group_of["params"]]
    for old in new_of:
        context.optimizer.state.pop(old, None)
    context.elsewhere = Elsewhere(shapes, {name: stages[0] % degree for name, stages in owner_of.items()}, group)


def _in_place_of(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_one_value(parameter.detach()), requires_grad=parameter.requires_grad)


def _one_value(whole: Tensor) -> Tensor:
    return whole.new_ones((1,) * whole.dim())
