"""Gradients that a weight shows although they are on another tier: the one seam between the user's code and
offloaded gradients.

From the end of a backward to the next forward or step, `grad` of a weight is the gradient of the parameter
that the optimizer has instead of it: the tensor that the step uses. User code reads, changes, replaces or
clears it as with the plain model, on whichever device the weight is.

A gradient that an update inside backward has used and freed is no more: until the step ends, code that reads,
assigns or clears it raises instead of finding None.

A weight that FSDP2 shards shows the rank's rows as a DTensor, with memory of the host's. A gradient counts
its changes in its version, those through `data` and by foreach kernels too.

A tracked weight counts the writes through its `data`, which its own `_version` does not. It has a subclass
that overrides `data`: every access returns an alias of one stored tensor, with which it shares the version
counter, as views do. Assignment (`p.data = ...`) replaces the stored tensor. Copies and pickles of a weight
are of torch's own class.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_DATA: Any = torch._C.TensorBase.data
_GRAD: Any = torch._C.TensorBase.grad


class _Shown(NamedTuple):
    """A gradient as it was when the user got it."""

    held: Tensor
    """The optimizer's parameter, whose gradient it is."""
    gradient: Callable[[], Tensor | None]
    """A weak reference."""
    version: int
    """-1 if there was none."""


class ShowsGrad(Tensor):
    """A weight whose `grad` is its own gradient, or else the one that it shows."""

    _shown: _Shown | None = None
    _shard: DTensor | None = None
    """The rows that are shown, as a DTensor."""
    _spent: Callable[[], Exception] | None = None
    """The error of code that reads a gradient that has been used."""

    @property
    def grad(self) -> Tensor | None:
        """Its own gradient, or the one that is shown."""
        own, shown = _GRAD.__get__(self), self._shown
        if own is None:
            self._require_unspent()
        if own is not None or shown is None or _in_backward():
            return own  # type: ignore[no-any-return]
        gradient: Tensor | None = _GRAD.__get__(shown.held)
        if gradient is None or not isinstance(self, DTensor) or isinstance(gradient, DTensor):
            return gradient
        if self._shard is None or self._shard._local_tensor is not gradient:
            self._shard = _as_shard_of(self, gradient)
        return self._shard

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        # An own gradient wins: autograd has accumulated it since the shown one was offloaded.
        shown, own = self._shown, _GRAD.__get__(self)
        if own is None:
            self._require_unspent()
        if shown is None or own is not None or _in_backward():
            _GRAD.__set__(self, gradient)
            return
        held = shown.held
        if isinstance(gradient, DTensor) and not isinstance(held, DTensor):
            if isinstance(self, DTensor) and gradient.placements != self.placements:
                gradient = gradient.redistribute(placements=self.placements)
            gradient = gradient._local_tensor
        _GRAD.__set__(held, None if gradient is None else gradient.to(held.device))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _require_unspent(self) -> None:
        # A second backward through one forward begins a new gradient, which memtune and FSDP2 read.
        if self._spent is not None and not _spent_as_none and not _in_backward():
            raise self._spent()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _as_plain(self, lambda plain: copy.deepcopy(plain, memo))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return _as_plain(self, lambda plain: plain.__reduce_ex__(protocol))


class _ShowingParameter(ShowsGrad, nn.Parameter):
    """A full parameter, while it shows a gradient."""


class _ShowingShard(ShowsGrad, DTensor):
    """A parameter that is sharded by rows, while it shows a gradient."""


_SHOWING: Final[dict[type, type]] = {nn.Parameter: _ShowingParameter, DTensor: _ShowingShard}
_OWN_NAMES: Final = ("_shown", "_shard", "_spent", "_kept", "_assigned", "_earlier")
"""Attributes of a weight that copies and pickles do not have."""


def _in_backward() -> bool:
    # FSDP2 adds a gradient to an earlier one itself, on the device: in a second backward through one forward.
    return torch._C._current_graph_task_id() != -1


_spent_as_none = 0


@contextmanager
def spent_as_none() -> Iterator[None]:
    """Have gradients that have been used be None, as memtune and torch's `zero_grad` expect."""
    global _spent_as_none
    _spent_as_none += 1
    try:
        yield
    finally:
        _spent_as_none -= 1


def show_as_spent(weight: Tensor, error: Callable[[], Exception]) -> None:
    """Have code that reads or sets `grad` of `weight` raise `error()`, until `hide_spent`."""
    if _can_show(weight):
        vars(weight)["_spent"] = error


def hide_spent(weight: Tensor) -> None:
    """End `show_as_spent`."""
    vars(weight).pop("_spent", None)
    weight.__class__ = class_of(weight, type(weight))


def _can_show(weight: Tensor) -> bool:
    if not isinstance(weight, ShowsGrad):
        if type(weight) not in _SHOWING:
            return False  # a fake tensor, which no user sees
        weight.__class__ = _SHOWING[type(weight)]
    return True


def show_grad_of(weight: Tensor, held: Tensor) -> None:
    """Have `grad` of `weight` be that of `held` while it has none of its own, until `hide_grad_of`."""
    if not _can_show(weight):
        return
    gradient = _GRAD.__get__(held)
    if gradient is None:
        vars(weight)["_shown"] = _Shown(held, lambda: None, -1)
    else:
        count_changes(gradient)
        vars(weight)["_shown"] = _Shown(held, weakref.ref(gradient), grad_version(gradient))


def hide_grad_of(weight: Tensor) -> bool:
    """End `show_grad_of`; return whether the user has changed, replaced or cleared the gradient meanwhile."""
    shown, shard = vars(weight).pop("_shown", None), vars(weight).pop("_shard", None)
    weight.__class__ = class_of(weight, type(weight))
    if shown is None:
        return False
    now = _GRAD.__get__(shown.held)
    if now is None:
        return bool(shown.version >= 0)
    if shard is not None and shard._local_tensor is now and shard._version:
        torch.autograd.graph.increment_version(now)  # rows do not count changes of the shard
    return now is not shown.gradient() or grad_version(now) != shown.version


def shows_grad(weight: Tensor) -> bool:
    """Return whether `weight` shows a gradient of another parameter, or that its own has been used."""
    return not {"_shown", "_spent"}.isdisjoint(vars(weight))


def class_of(weight: Tensor, kind: type) -> type:
    """Return the class that `weight`, else of class `kind`, has while it shows a gradient, or does not."""
    if kind in _SHOWING and shows_grad(weight):
        return _SHOWING[kind]
    return _PLAIN_TYPES[kind] if kind in _SHOWING.values() and not shows_grad(weight) else kind


def plain_type(tensor: Tensor) -> type:
    """Return the class of `tensor` without tracking and without a shown gradient."""
    return _PLAIN_TYPES.get(type(tensor), type(tensor))


def _as_shard_of(weight: DTensor, rows: Tensor) -> DTensor:
    # Of the mesh's device, as the weight, and with memory of the host's, as the weight between uses.
    like = torch.empty((), dtype=rows.dtype, device=weight.device).expand(rows.shape)
    kind: Any = DTensor
    found: DTensor = kind(like, weight._spec, requires_grad=False)
    found._local_tensor = rows
    count_changes(found)
    return found


def _as_plain(weight: Tensor, call: Callable[[Any], Any]) -> Any:
    kind, held = type(weight), vars(weight)
    # torch's copy and pickle look at the class, and what the weight holds would be copied. A pickle reads the
    # dictionary after this call, when it is written, so the weight gets another one meanwhile.
    weight.__class__ = _PLAIN_TYPES[kind]
    weight.__dict__ = {name: value for name, value in held.items() if name not in _OWN_NAMES}
    try:
        return call(weight)
    finally:
        weight.__class__, weight.__dict__ = kind, held


# -- versions of gradients -----------------------------------------------------------------------------------


def grad_version(gradient: Tensor) -> int:
    """Return a number that changes with each write of `gradient` in place, of a DTensor's rows too."""
    return gradient._version + (gradient._local_tensor._version if isinstance(gradient, DTensor) else 0)


def _set_data(gradient: Tensor, value: Tensor) -> None:
    _DATA.__set__(gradient, value)
    torch.autograd.graph.increment_version(gradient)


_COUNTED_DATA = property(Tensor.detach, _set_data)
"""`data` of a gradient that shares its version counter; torch's own has a counter of its own."""


class _CountedTensor(Tensor):
    """A gradient on one rank whose version counter includes writes through `data`."""

    # Results are of torch's own class.
    __torch_function__: Any = torch._C._disabled_torch_function_impl
    data = _COUNTED_DATA

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.detach(), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.detach().__reduce_ex__(protocol)


def _data_of(gradient: Tensor) -> Tensor:
    # Rows in memory of another device than the DTensor's cannot be detached, nor need they be.
    return Tensor.detach(gradient) if gradient.requires_grad else gradient


class _CountedShard(DTensor):
    """A gradient whose version counter includes foreach kernels, which do not count changes of DTensors."""

    data = property(_data_of, _set_data)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.endswith("_") and args and isinstance(args[0], list | tuple):
            for each in args[0]:
                if isinstance(each, cls):
                    torch.autograd.graph.increment_version(each)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def count_changes(gradient: Tensor) -> None:
    """Make the version of `gradient` count changes in place by foreach kernels and through `data` too."""
    if type(gradient) in _COUNTED:
        gradient.__class__ = _COUNTED[type(gradient)]


_COUNTED: Final[dict[type, type]] = {Tensor: _CountedTensor, DTensor: _CountedShard}


# -- versions of weights' `data` -----------------------------------------------------------------------------


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
_TRACKED: Final = frozenset(_ALIASED.values())
_PLAIN_TYPES: Final[dict[type, type]] = {
    own: plain for known in (_SHOWING, _ALIASED) for plain, own in known.items()
}
"""Classes of weights → torch's own class."""


def track_data(weight: Tensor) -> None:
    """Track the `data` of `weight` from now on, if it is a plain parameter."""
    if type(weight) in _ALIASED:
        weight.__class__ = _ALIASED[type(weight)]


def is_tracked(weight: Tensor) -> bool:
    """Return whether `track_data` tracks `weight`."""
    return type(weight) in _TRACKED


def is_data_used() -> bool:
    """Return whether `data` of a tracked weight was used in this process: else all versions are equal."""
    return _used


def untrack_data(weight: Tensor) -> None:
    """Restore torch's own `data` of `weight`."""
    if is_tracked(weight):
        for name in _OWN_NAMES:
            vars(weight).pop(name, None)
        weight.__class__ = _PLAIN_TYPES[type(weight)]


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
