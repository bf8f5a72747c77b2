"""Modules whose weights have been let go: who would read the memory that is not there is told so, in place of a crash."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memtune.errors import ApplyError
from memtune.runtime.let_go import are_back, is_let_go, let_go
from memtune.runtime.tree import local


def guard_reads(module: nn.Module) -> None:
    """Copies (`copy.deepcopy`, `torch.save`) and what changes all weights (`double`, `to`) are refused while some are let go."""
    vars(module)["_apply"] = MethodType(_apply, module)
    vars(module)["__deepcopy__"] = MethodType(_deepcopy, module)
    vars(module)["__reduce_ex__"] = MethodType(_reduce, module)


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
    for parameter in _released(self):
        probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if fn(probe) is not probe:
            _refuse("changed in type or place", "model.double(), .to(...) or the like before memtune.apply")
    gone = [each for each in self.parameters() if is_let_go(each)]
    are_back(gone)  # for calls that change nothing
    try:
        module: nn.Module = type(self)._apply(self, fn, *args, **kwargs)
    finally:
        let_go(gone)
    return module


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if _released(self):
        _refuse("copied", "Tuned.state_dict, loaded into a model of its own")
    own = {name: vars(self).pop(name) for name in ("_apply", "__deepcopy__", "__reduce_ex__")}
    try:
        return copy.deepcopy(self, memo)
    finally:
        vars(self).update(own)


def _reduce(self: nn.Module, protocol: SupportsIndex) -> Any:
    if _released(self):
        _refuse("pickled", "torch.save of Tuned.state_dict(), or Tuned.save")
    return type(self).__reduce_ex__(self, protocol)


def _released(module: nn.Module) -> list[nn.Parameter]:
    found = (each for each in module.parameters() if not isinstance(local(each.detach()), FakeTensor))
    return [each for each in found if is_let_go(each) or (local(each.detach()).untyped_storage().nbytes() == 0 and each.numel())]


def _refuse(what: str, fix: str) -> None:
    raise ApplyError(
        f"The model cannot be {what} here: weights of its blocks are on the host, and let go on the device between uses.",
        fix=fix, code="MT364",
    )  # fmt: skip
