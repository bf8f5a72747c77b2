"""Version counter for writes through `weight.data`, which the weight's own `_version` does not count.

A tracked weight has a subclass that overrides `data`: every access returns an alias of one stored tensor,
with which it shares the version counter, as views do. Assignment (`p.data = ...`) replaces the stored tensor.
Copies and pickles of a weight are of torch's own class.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memtune.runtime.shown_grad import OWN_NAMES, PLAIN_TYPES, ShowsGrad

_DATA: Any = torch._C.TensorBase.data


class _AliasedData(ShowsGrad):
    """Tensor with an overridden `data`, whose copies and pickles are of the plain class."""

    _kept: Tensor | None = None
    _assigned = 0
    """Number of assignments of `data`."""
    _earlier = 0
    """Writes through aliases of memory that the tensor had before, and has no more."""

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
_OWN: Final = ("_kept", "_assigned", "_earlier")
_PLAIN: Final[dict[type, type]] = {shown: plain for plain, shown in _ALIASED.items()}
OWN_NAMES.extend(_OWN)
PLAIN_TYPES.update(_PLAIN)


def track_data(weight: Tensor) -> None:
    """Track the `data` of `weight` from now on, if it is a plain parameter."""
    if type(weight) in _ALIASED:
        weight.__class__ = _ALIASED[type(weight)]


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
        for name in OWN_NAMES:
            vars(weight).pop(name, None)
        weight.__class__ = _PLAIN[type(weight)]


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
