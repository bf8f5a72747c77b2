"""Weights whose `data` is looked at: what is written through it has a version of its own, which the weight's does not tell of.

Two rules:

Rule 1. A weight that is looked at is of a class of its own, which differs in `data` alone: all that it shows are aliases of one
        that is kept, and share its version, as views of them do. What is put in its place (`p.data = ...`) is the one from then
        on.
Rule 2. Copies of a weight, and what is pickled of it, are of torch's own class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final, SupportsIndex

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_DATA: Any = torch._C.TensorBase.data


class _Shown(Tensor):
    """Rules 1 and 2."""

    _kept: Tensor | None = None

    @property
    def data(self) -> Tensor:
        """An alias of the one that is kept."""
        here: Tensor = _DATA.__get__(self)
        if self._kept is None or _place(self._kept) != _place(here):
            self._kept = here
        return self._kept.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _DATA.__set__(self, value)
        vars(self).pop("_kept", None)
        if not value.is_inference():  # those have no version
            self._kept = value.detach()  # written before, as in  p.data = p.data.mul_(2), or later through another name

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _as_plain(self, lambda plain: copy.deepcopy(plain, memo))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return _as_plain(self, lambda plain: plain.__reduce_ex__(protocol))


class _ShownParameter(_Shown, nn.Parameter):
    """Of a weight that a rank has whole."""


class _ShownRows(_Shown, DTensor):
    """Of a weight of which a rank has rows."""

    def detach(self) -> Tensor:
        """Of the same class, as `nn.Parameter` wants it of what it is made of (`model.to`)."""
        found: Any = super().detach()
        found.__class__ = _ShownRows
        return found  # type: ignore[no-any-return]


_SHOWN: Final[dict[type, type]] = {nn.Parameter: _ShownParameter, DTensor: _ShownRows}
_PLAIN: Final[dict[type, type]] = {shown: plain for plain, shown in _SHOWN.items()}


def show(weight: Tensor) -> None:
    """Look at the `data` of `weight` from here on, if it is a plain parameter."""
    if type(weight) in _SHOWN:
        weight.__class__ = _SHOWN[type(weight)]


def hide(weight: Tensor) -> None:
    """The `data` of `weight` is torch's own again."""
    if type(weight) in _PLAIN:
        vars(weight).pop("_kept", None)
        weight.__class__ = _PLAIN[type(weight)]


def plain_type(tensor: Tensor) -> type:
    """What `type` says of `tensor` while nobody looks at its `data`."""
    return _PLAIN.get(type(tensor), type(tensor))


def version_of_data(weight: Tensor) -> int:
    """Changes with each write through `data` of a weight that is looked at."""
    kept = weight._kept if isinstance(weight, _Shown) else None
    return 0 if kept is None else kept._version


def _place(tensor: Tensor) -> tuple[Any, ...]:
    here = getattr(tensor, "_local_tensor", tensor)
    return here.untyped_storage()._cdata, here.storage_offset(), here.shape, here.stride(), here.dtype


def _as_plain(weight: _Shown, call: Callable[[Tensor], Any]) -> Any:
    kind, kept = type(weight), weight._kept
    hide(weight)
    try:
        return call(weight)
    finally:
        weight.__class__ = kind
        if kept is not None:
            weight._kept = kept
