"""Weights that only other ranks of a group hold: their placeholders, and their values in state dicts.

The placeholder of another rank's parameter is one value with as many dimensions, so that optimizers and
parameter groups are unchanged; its updates are never used. State dicts omit it (checkpoints, of which each
rank writes its part) or receive the value from its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _foreach_utils

from memtune.deferred_init import keep_only
from memtune.errors import ApplyError
from memtune.runtime import Context, local


@dataclass(frozen=True, eq=False)
class OtherRanks:
    """Other ranks' entries, by name in the plain model's state dict; a tied weight under each name."""

    absent: Mapping[str, torch.Size]
    """Full shapes of the entries that this rank does not hold."""
    owner: Mapping[str, int]
    """The owner of each entry of the state dict, as rank of the group."""
    group: dist.ProcessGroup
    device: torch.device
    """Device of the model, from which the group sends."""

    def owns(self, name: str) -> bool:
        """Return True if this rank owns `name`."""
        return self.owner[name] == self.group.rank()

    def shape(self, name: str, here: Tensor) -> torch.Size:
        """Return the full shape of `name`."""
        return self.absent.get(name, here.shape)

    def full_value(self, name: str, here: Any) -> Any:
        """Return the value of `name` from its owner; collective, in one order on all ranks."""
        if not isinstance(here, Tensor):
            return here
        value = here.detach() if self.owns(name) else here.new_empty(self.shape(name, here))
        return self._sent(value.contiguous(), name)

    def optimizer_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizer's state of `name` from its owner; collective."""
        # Two messages: other ranks do not know the state's names and shapes, which depend on the optimizer.
        forms: list[Any] = [
            {what: _form(value) for what, value in state.items()} if self.owns(name) else None
        ]
        dist.broadcast_object_list(forms, group=self.group, group_src=self.owner[name])
        found = {}
        for what, form in forms[0].items():
            if not isinstance(form, _Form):
                found[what] = form
                continue
            value = state[what].detach().contiguous() if self.owns(name) else form.empty()
            found[what] = self._sent(value, name)
        return found

    def _sent(self, value: Tensor, name: str) -> Tensor:
        # NCCL sends nothing from the host, where optimizers have their step counts and offloaded values are.
        sent = value.to(self.device)
        dist.broadcast(sent, group=self.group, group_src=self.owner[name])
        return value if sent is value else value.copy_(sent)


class NormAlone(Tensor):
    """Gradient of a placeholder: one value, the 2-norm of the real gradient."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Dispatch as for a plain tensor.

        Raises:
            ApplyError: Another norm than p = 2 is computed.
        """
        given = kwargs or {}
        if func in _NORMS:
            order = args[1] if len(args) > 1 else given.get("ord", given.get("p", 2))
            if order not in (2, 2.0, None, "fro"):
                raise ApplyError(
                    f"the {order}-norm of gradients is not known on the ranks that divide the model.",
                    evidence="Of another rank's gradient a rank has the 2-norm alone.",
                    fix="clip by norm_type=2, or parallel: {kind: none}",
                    code="MT398",
                )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **given)


# As DTensor does: else all gradients would be taken one by one, and those in a list with a DTensor not at
# all.
_foreach_utils._foreach_supported_types.append(NormAlone)
ParameterPlace: TypeAlias = tuple[str, Mapping[str, "nn.Parameter | None"], str]
_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch._foreach_norm, torch.norm, Tensor.norm)


def parameter_places(model: nn.Module) -> list[ParameterPlace]:
    """Return the name of each parameter as `named_parameters` has it, and where a module holds it."""
    # To walk all modules at each step takes longer than a block of small ops, and FSDP2 replaces
    # parameters at their places only.
    seen, found = set[nn.Parameter](), list[ParameterPlace]()
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                found.append((f"{path}.{key}" if path else key, module._parameters, key))
    return found


class SharedNorms:
    """The norms of all gradients of a model, which the ranks of a group exchange for their placeholders.

    Args:
        context: Its `placement` has `remote_parameters` when norms are shared.
        group: The ranks that hold the model together.
    """

    def __init__(self, context: Context, group: dist.ProcessGroup) -> None:
        self._context, self._group = context, group
        self.sharers: dist.ProcessGroup | None = None
        """Ranks over which gradients are sharded; norms sum over them."""
        self._gradients, self._places = PlaceholderGradients(), list[ParameterPlace]()

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that need gradients, and their placeholders, by name."""
        if not self._places:
            self._places = parameter_places(self._context.model)
        found = ((name, held_by[key]) for name, held_by, key in self._places)
        return [(name, p) for name, p in found if p is not None and p.requires_grad]

    def share(self) -> None:
        """Give each placeholder the norm of the real gradient; collective, when gradients are complete."""
        held, trained = self._context.placement.remote_parameters, self.trained()
        assert held is not None
        mine = [i for i, (name, p) in enumerate(trained) if p.grad is not None and held.owns(name)]
        # Row 0: norms. Row 1: 1 from the rank that has the gradient, so that a missing one remains None.
        norms = torch.zeros(2, len(trained), device=self._context.device)
        if mine:
            found = torch._foreach_norm([local(_grad(trained[i][1])) for i in mine])
            norms[0, mine] = torch.stack([norm.float() for norm in found])
            norms[1, mine] = 1
        if self.sharers is not None:  # each has some rows of what the owner holds
            # A norm of sharded rows is a norm of partial norms: sum of squares over those that share them.
            norms[0].square_()
            torch.ops.memtune.all_reduce_(norms[0], self.sharers.group_name, self.sharers.size(), "sum")
            norms[0].sqrt_()
        torch.ops.memtune.all_reduce_(norms, self._group.group_name, self._group.size(), "sum")
        # One value per absent parameter: `clip_grad_norm_` over all of them then gives the full model's norm.
        absent = {i: p for i, (name, p) in enumerate(trained) if name in held.absent}
        self._gradients.assign(absent, norms[0], norms[1].tolist())


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


class PlaceholderGradients:
    """Gradients of placeholders: views of one tensor of norms per dtype, filled by each step."""

    def __init__(self) -> None:
        self._made_for: list[tuple[int, torch.dtype, int]] = []
        self._norms: dict[torch.dtype, Tensor] = {}
        self._gradients: list[Tensor] = []

    def assign(self, placeholders: Mapping[int, Tensor], norms: Tensor, there: Sequence[float]) -> None:
        """Set the gradient of each placeholder to its norm, or to None."""
        form = [(row, each.dtype, each.dim()) for row, each in placeholders.items()]
        if form != self._made_for or any(len(each) != len(norms) for each in self._norms.values()):
            self._norms = {dtype: torch.empty_like(norms, dtype=dtype) for _, dtype, _ in form}
            self._gradients = [
                self._norms[dtype].as_strided((1,) * dim, (1,) * dim, row).as_subclass(NormAlone)
                for row, dtype, dim in form
            ]
            self._made_for = form
        for each in self._norms.values():
            each.copy_(norms)
        for (row, placeholder), gradient in zip(placeholders.items(), self._gradients, strict=True):
            placeholder.grad = gradient if there[row] else None


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
    context: Context,
    owners: Mapping[str, Sequence[int]],
    mine: Sequence[int],
    degree: int,
    group: dist.ProcessGroup,
) -> None:
    """Replace the parameters of other ranks in the model and the optimizer of `context`.

    Args:
        context: Changed in place; gets `remote_parameters`.
        owners: Entry of the state dict → the stages that hold it, its owner first.
        mine: Stages of this rank.
        degree: Ranks of the group; stage s is of rank s % degree.
        group: The ranks that hold the model together.
    """
    named = dict(context.model.named_parameters(remove_duplicate=False))
    # `named_parameters` reports a tied weight under its first name only; that one decides.
    canonical = {id(p): name for name, p in context.model.named_parameters()}
    owner_of = {name: owners[canonical[id(named[name])] if name in named else name] for name in owners}
    absent = {name for name, stages in owner_of.items() if not set(stages) & set(mine)}
    state = context.model.state_dict(keep_vars=True)
    shapes = {name: state[name].shape for name in absent if isinstance(state[name], Tensor)}
    replaced = put_placeholders(context.model, absent)
    # A deferred model never materializes the weights of other ranks.
    keep_only(context.model, {name: _one_value for name in canonical.values() if name in absent})
    for group_of in context.optimizer.param_groups:
        group_of["params"] = [replaced.get(parameter, parameter) for parameter in group_of["params"]]
    for old in replaced:
        # State of another rank's weight would stay in memory, and be wrong after its first update there.
        context.optimizer.state.pop(old, None)
    context.placement.remote_parameters = OtherRanks(
        shapes, {name: stages[0] % degree for name, stages in owner_of.items()}, group, context.device
    )


def put_placeholders(model: nn.Module, absent: Collection[str]) -> dict[nn.Parameter, nn.Parameter]:
    """Put a placeholder instead of each parameter `absent`; return them by the parameter replaced."""
    canonical = {id(p): name for name, p in model.named_parameters()}
    new_of: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and canonical.get(id(parameter)) in absent:
                new_of.setdefault(parameter, _in_place_of(parameter))
                module._parameters[name] = new_of[parameter]
    return new_of


def _in_place_of(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_one_value(parameter.detach()), requires_grad=parameter.requires_grad)


def _one_value(whole: Tensor) -> Tensor:
    return whole.new_ones((1,) * whole.dim())
