"""Weights without memory: whoever reads or writes one is told so. torch's kernels would end the process, or compute with noise.

Four rules:

Rule 1. While a parameter's memory is given back, or has other values, it is of a class of its own, which looks at every call of
        torch in which it takes part: what asks for its shape, its gradient and the like is answered, all else is refused. What is
        there is a plain parameter, and costs nothing. The same holds for a rank's rows of a parameter that FSDP2 divides.
Rule 2. A `detach` of one, which state dicts are made of, its `data` and its rows are looked at in the same way, for as long as it
        is gone.
Rule 3. Memory that the user has put in the place of a parameter's own (`parameter.data = ...`) would never come and go: it is
        noticed when that is given back or taken, and refused.
Rule 4. Modules with such weights, or with rows of some that FSDP2 gathers, are not copied, nor changed in type or place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Final, SupportsIndex

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from memtune.errors import ApplyError
from memtune.runtime.shown_data import hide
from memtune.runtime.tree import local

_ALIASES: Final = frozenset({"data", "detach"})
_READ: Final = frozenset({"T", "H", "mT", "mH", "real", "imag"})
"""Attributes that are tensors of the same memory."""
_TEXTS: Final = frozenset({"__repr__", "__format__", "__str__"})
_HARMLESS: Final = frozenset(
    {"size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "untyped_storage", "__len__"}
    | {"is_contiguous", "is_floating_point", "is_complex", "is_pinned", "is_shared", "get_device", "data_ptr", "__hash__"}
    | {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "grad", "backward", "_backward_hooks"}
    | {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
    | {"new_empty", "new_zeros", "new_ones", "new_full"}
)
"""Functions and methods that do not look at values; `torch.autograd.grad` is one."""
_FIX: Final = "Tuned.state_dict() or model.state_dict(), which have the values, and load_state_dict to change them"


class _Looked(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, kind = _called(func)
        gone = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Looked) and _is_gone(each)]
        with torch._C.DisableTorchFunctionSubclass():
            if gone and kind == "text":
                return _text(gone[0])
            if gone and kind == "values":
                _refuse(name, gone[0])
            found = func(*args, **kwargs)
            return _alias(found, gone[0]) if gone and kind == "alias" else found


class _Alias(_Looked):
    """Rule 2."""

    _owner: Tensor


class _LetGo(_Looked, nn.Parameter):
    """Rule 1."""


class _LookedRows(_Looked, DTensor):
    """What of a DTensor is plain Python, which looks at the rows by itself."""

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        if _is_gone(self):
            rows: Tensor = _alias(self._local_tensor.detach(), self)
            return rows
        return super().to_local(grad_placements=grad_placements)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        if _is_gone(self):
            _refuse("redistribute", self)
        return super().redistribute(*args, **kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        if _is_gone(self):
            _refuse("full_tensor", self)
        return super().full_tensor(**kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return _text(self) if _is_gone(self) else super().__repr__()  # type: ignore[no-untyped-call]


class _RowsAlias(_LookedRows):
    """Rule 2."""

    _owner: Tensor


class _LetGoRows(_LookedRows):
    """Rule 1, of a parameter that FSDP2 divides."""


_GONE: Final[dict[type, type]] = {nn.Parameter: _LetGo, DTensor: _LetGoRows}
_THERE: Final[dict[type, type]] = {gone: there for there, gone in _GONE.items()}


def _alias(found: Any, of: Tensor) -> Any:
    found.__class__ = _RowsAlias if isinstance(found, DTensor) else _Alias
    found._owner = getattr(of, "_owner", of)
    return found


def _called(func: Any) -> tuple[str, str]:
    """The name of what was called, and whether that is harmless, an alias, a text, or takes values."""
    name, owner = str(getattr(func, "__name__", func)), getattr(func, "__self__", None)
    if name in ("__get__", "__set__", "__delete__"):
        attribute = str(getattr(owner, "__name__", None) or getattr(getattr(owner, "fget", None), "__name__", ""))
        takes = attribute in _READ if name == "__get__" else attribute == "data"
        alias = name == "__get__" and attribute in _ALIASES
        return f"parameter.{attribute}", "values" if takes else "alias" if alias else "harmless"
    kind = "alias" if name in _ALIASES else "text" if name in _TEXTS else "harmless" if name in _HARMLESS else "values"
    return name, kind


def _is_gone(tensor: _Looked) -> bool:
    return type(tensor._owner if isinstance(tensor, _Alias | _RowsAlias) else tensor) in _THERE


def _text(tensor: Tensor) -> str:
    return f"a weight of shape {tuple(tensor.shape)} that is not on the device now"


def _refuse(name: str, tensor: Tensor) -> None:
    raise ApplyError(
        f"A weight of shape {tuple(tensor.shape)} is on the host, and let go on the device between uses.",
        evidence=f"{name} has nothing to work on.",
        fix=_FIX, code="MT364",
    )  # fmt: skip


def let_go(parameters: Iterable[nn.Parameter]) -> None:
    """Their memory has been given back, or others' values come to it (Rule 1); other classes, and fake rows, stay as they are."""
    for each in parameters:
        hide(each)
        if type(each) in _GONE and not isinstance(getattr(each, "_local_tensor", None), FakeTensor):
            each.__class__ = _GONE[type(each)]


def are_back(parameters: Iterable[nn.Parameter]) -> None:
    """They have memory, and are about to have their values."""
    for each in parameters:
        if type(each) in _THERE:
            each.__class__ = _THERE[type(each)]


def require_own_memory(parameters: Iterable[nn.Parameter], memory: Tensor) -> None:
    """Rule 3.

    Raises:
        ApplyError: One of `parameters` is not in that of `memory`.
    """
    own = memory.untyped_storage()._cdata
    wrong = [each for each in parameters if getattr(each, "_local_tensor", each).untyped_storage()._cdata != own]
    if wrong:
        raise ApplyError(
            f"The memory of a weight of shape {tuple(wrong[0].shape)} was replaced, as  parameter.data = ...  does.",
            evidence="It comes and goes between device and host, in memory of its own.",
            fix="model.load_state_dict, of the whole model or a part, or Tuned.load_state_dict", code="MT364",
        )  # fmt: skip


def guard_module(module: nn.Module) -> None:
    """Rule 4: copies (`copy.deepcopy`, `torch.save`), and what changes all weights (`to`), are refused while some are let go."""
    vars(module)["_apply"] = MethodType(_apply, module)
    vars(module)["__deepcopy__"] = MethodType(_deepcopy, module)
    vars(module)["__reduce_ex__"] = MethodType(_reduce, module)


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
    for parameter in _gone_of(self):
        probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if fn(probe) is not probe:
            _refuse_module("changed in type or place", "model.double(), .to(...) or the like before memtune.apply")
    gone = [each for each in self.parameters() if type(each) in _THERE]
    are_back(gone)  # for calls that change nothing
    try:
        module: nn.Module = type(self)._apply(self, fn, *args, **kwargs)
    finally:
        let_go(gone)
    return module


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if _gone_of(self):
        _refuse_module("copied", "Tuned.state_dict, loaded into a model of its own")
    own = {name: vars(self).pop(name) for name in ("_apply", "__deepcopy__", "__reduce_ex__")}
    try:
        return copy.deepcopy(self, memo)
    finally:
        vars(self).update(own)


def _reduce(self: nn.Module, protocol: SupportsIndex) -> Any:
    if _gone_of(self):
        _refuse_module("pickled", "torch.save of Tuned.state_dict(), or Tuned.save")
    return type(self).__reduce_ex__(self, protocol)


def _gone_of(module: nn.Module) -> list[nn.Parameter]:
    found = (each for each in module.parameters() if not isinstance(local(each.detach()), FakeTensor))
    return [each for each in found if type(each) in _THERE or (each.numel() and not _local_bytes(each))]


def _local_bytes(parameter: nn.Parameter) -> int:
    return local(parameter.detach()).untyped_storage().nbytes()


def _refuse_module(what: str, fix: str) -> None:
    raise ApplyError(
        f"The model cannot be {what} here: weights of its blocks are on the host, and let go on the device between uses.",
        fix=fix, code="MT364",
    )  # fmt: skip
