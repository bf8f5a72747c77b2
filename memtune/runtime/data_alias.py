"""Version counter for writes through `weight.data`, which the weight's own `_version` does not count.

A tracked weight has a subclass that overrides `data`: every access returns an alias of one stored tensor,
with which it shares the version counter, as views do. Assignment (`p.data = ...`) replaces the stored tensor.
Copies and pickles of a weight are of torch's own class.

A tracked weight also shows a gradient that is on another tier: after `show_grad_of`, `grad` is that of the
optimizer's parameter while the weight has none of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final, SupportsIndex

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_DATA: Any = torch._C.TensorBase.data
_GRAD: Any = torch._C.TensorBase.grad


class _AliasedData(Tensor):
    """Tensor with an overridden `data`, whose copies and pickles are of the plain class."""

    _kept: Tensor | None = None
    _assigned = 0
    """Number of assignments of `data`."""
    _earlier = 0
    """Writes through aliases of memory that the tensor had before, and has no more."""
    _optimized: Tensor | None = None
    """The optimizer's parameter whose gradient is shown."""

    @property
    def grad(self) -> Tensor | None:
        """Its own gradient, or the one that is shown."""
        own, held = _GRAD.__get__(self), self._optimized
        return own if own is not None or held is None else _GRAD.__get__(held)  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        # An own gradient wins: autograd has accumulated it since the shown one was offloaded.
        held = self._optimized
        if held is None or _GRAD.__get__(self) is not None:
            _GRAD.__set__(self, gradient)
        else:
            _GRAD.__set__(held, None if gradient is None else gradient.to(held.device))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        """Return an alias of the stored tensor."""
        global _used
        _used = True
        here: Tensor = _DATA.__get__(self)
        # `resize_` of a storage or a swap of the tensor makes a new memory, which the stored alias would not
        # show.
        if self._kept is None or _place(self._kept) != _place(here):
            self._earlier += 0 if self._kept is None else self._kept._version
            self._kept = here
        # A new alias each time: torch, too, returns another object from every `p.data`.
        return self._kept.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        global _used
        _used = True
        _DATA.__set__(self, value)
        self._assigned += 1
        vars(self).pop("_kept", None)
        if not value.is_inference():  # inference tensors have no version counter
            # An alias of `value`, whose counter includes writes before the assignment
            # (p.data = p.data.mul_(2)) and later ones through another name.
            self._kept = value.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _as_plain(self, lambda plain: copy.deepcopy(plain, memo))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return _as_plain(self, lambda plain: plain.__reduce_ex__(protocol))


_used = False
"""`data` of a tracked weight has been read or assigned in this process."""


class _AliasedParameter(_AliasedData, nn.Parameter):
    """Class of a tracked full parameter."""


class _AliasedShard(_AliasedData, DTensor):
    """Class of a tracked parameter that is sharded by rows."""

    def detach(self) -> Tensor:
        """Return a tensor of the same class, which `nn.Parameter` requires of its data (`model.to`)."""
        found: Any = super().detach()
        found.__class__ = _AliasedShard
        return found  # type: ignore[no-any-return]


_ALIASED: Final[dict[type, type]] = {nn.Parameter: _AliasedParameter, DTensor: _AliasedShard}
_OWN: Final = ("_kept", "_assigned", "_earlier", "_optimized")
_PLAIN: Final[dict[type, type]] = {shown: plain for plain, shown in _ALIASED.items()}


def track_data(weight: Tensor) -> None:
    """Track the `data` of `weight` from now on, if it is a plain parameter."""
    if type(weight) in _ALIASED:
        weight.__class__ = _ALIASED[type(weight)]


def show_grad_of(weight: Tensor, held: Tensor | None) -> None:
    """Have `grad` of a tracked `weight` be that of `held` while it has none of its own; None: no longer."""
    if held is None:
        vars(weight).pop("_optimized", None)
    else:
        vars(weight)["_optimized"] = held


def is_tracked(weight: Tensor) -> bool:
    """Return whether `track_data` tracks `weight`."""
    return type(weight) in _PLAIN


def is_data_used() -> bool:
    """Return whether `data` of a tracked weight has been read or assigned in this process.

    If not, `version_of_data` is the same for all weights.
    """
    return _used


def untrack_data(weight: Tensor) -> None:
    """Restore torch's own `data` of `weight`."""
    if type(weight) in _PLAIN:
        for name in _OWN:
            vars(weight).pop(name, None)
        weight.__class__ = _PLAIN[type(weight)]


def plain_type(tensor: Tensor) -> type:
    """Return the class of `tensor` without tracking."""
    return _PLAIN.get(type(tensor), type(tensor))


def version_of_data(weight: Tensor) -> tuple[int, int]:
    """Return numbers that change with each assignment and each write through `data` of a tracked weight."""
    if not _used:
        return 0, 0
    held = vars(weight)  # also of a weight that has another class for a time
    kept = held.get("_kept")
    return held.get("_assigned", 0), held.get("_earlier", 0) + (0 if kept is None else kept._version)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    here = getattr(tensor, "_local_tensor", tensor)
    return here.untyped_storage()._cdata, here.storage_offset(), here.shape, here.stride(), here.dtype


def _as_plain(weight: _AliasedData, call: Callable[[Any], Any]) -> Any:
    kind, held = type(weight), vars(weight)
    # torch's copy and pickle look at the class, and `_kept` would be a second tensor. A pickle reads
    # the dictionary after this call, when it is written, so the weight gets another one meanwhile.
    weight.__class__ = _PLAIN[kind]
    weight.__dict__ = {name: value for name, value in held.items() if name not in _OWN}
    try:
        return call(weight)
    finally:
        weight.__class__, weight.__dict__ = kind, held
