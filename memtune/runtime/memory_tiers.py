"""Memory tiers: the kind of memory in which a storage lives, on any device.

On a GPU the tiers are different memories. On CPU they are a convention: everything is in the same RAM, and
storages made inside `with tier("host"):` belong to the host tier, which the device budget does not count.
Real storages made while the native ledger is installed carry their tier themselves; all others (fake tensors,
no compiler) are marked by the dispatch mode that is active.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Tier = Literal["device", "host", "ssd"]
TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
DEVICE, HOST, SSD = TIERS

_local = threading.local()
_marked: dict[int, tuple[weakref.ref[torch.UntypedStorage], Tier]] = {}

# Set by memtune.memory.cpu_allocator when it installs the native ledger: one sends this thread's tier to the
# allocator, the other returns the tier of a storage that the allocator made.
_tell_native: Callable[[int], object] | None = None
_ask_native: Callable[[int], int] | None = None


def connect(tell: Callable[[int], object], ask: Callable[[int], int]) -> None:
    """Connect a native allocator to `with tier(...)` and `tier_of`.

    Args:
        tell: Called with the index in `TIERS` whenever this thread's tier changes, and once now.
        ask: From a storage's address to its index in `TIERS`, negative if the allocator did not make it.
    """
    global _tell_native, _ask_native
    _tell_native, _ask_native = tell, ask
    tell(TIERS.index(current_tier()))


def current_tier() -> Tier:
    """Return the tier of storages made by this thread; `device` outside any `with tier(...)`."""
    found: Tier = getattr(_local, "tier", DEVICE)
    return found


class tier:
    """Context in which storages that this thread makes belong to tier `name`; nests."""

    __slots__ = ("_before", "_name")

    def __init__(self, name: Tier) -> None:
        if name not in TIERS:
            raise ValueError(f"tier must be one of {', '.join(TIERS)}, not {name!r}")
        self._name = name

    # Entered for every copy: no further calls. The allocator runs below Python, so it needs its own copy of
    # the thread's tier.
    def __enter__(self) -> None:
        self._before: Tier = getattr(_local, "tier", DEVICE)
        _local.tier = self._name
        if _tell_native is not None:
            _tell_native(TIERS.index(self._name))

    def __exit__(self, *_: object) -> None:
        _local.tier = self._before
        if _tell_native is not None:
            _tell_native(TIERS.index(self._before))


def cloned(x: Tensor, name: Tier) -> Tensor:
    """Return a clone of `x` in tier `name`, which no dispatch mode sees being made."""
    if _tell_native is None:  # no allocator asks for the tier
        return x.clone()
    with tier(name):
        return x.clone()


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of `tensor`'s bytes on this rank: the inner ones of a DTensor."""
    # A tensor subclass has no storage of its own; its bytes are those of its inner tensors.
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # a DTensor also lists its mesh
                yield from storages_of(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()


def mark(tensor: torch.Tensor, name: Tier) -> None:
    """Assign `tensor`'s storages to tier `name` while they exist, instead of that in which they were made."""
    for storage in storages_of(tensor):
        mark_storage(storage, name)


def mark_storage(storage: torch.UntypedStorage, name: Tier) -> None:
    """Assign `storage` to tier `name`, for as long as it exists."""
    key = storage._cdata

    # Addresses are reused, so a delayed clean-up must not drop the entry of the next storage at this address.
    def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
        if key in _marked and _marked[key][0] is reference:
            del _marked[key]

    _marked[key] = (weakref.ref(storage, forget), name)


def tier_of(tensor: torch.Tensor) -> Tier:
    """Return the tier of `tensor`'s (first) storage: as marked, else of the native ledger, else `device`."""
    return next((tier_of_storage(storage) for storage in storages_of(tensor)), DEVICE)


def tier_of_storage(storage: torch.UntypedStorage) -> Tier:
    """Return the tier of `storage`: as marked, else as the native ledger made it, else `device`."""
    # A mark outranks the allocator: it is set where a tensor's purpose is known.
    entry = _marked.get(storage._cdata)
    if entry is not None:
        return entry[1]
    made = _ask_native(storage._cdata) if _ask_native is not None else -1
    return TIERS[made] if made >= 0 else DEVICE


# Used at every step: several times as fast as `named_parameters` and `named_buffers`.
def members_of(module: nn.Module) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return parameters and buffers of `module` and its submodules, each once."""
    parameters: dict[int, nn.Parameter] = {}
    buffers: dict[int, Tensor] = {}
    seen, left = {id(module)}, [module]
    while left:
        each = left.pop()
        parameters.update((id(tensor), tensor) for tensor in each._parameters.values() if tensor is not None)
        buffers.update((id(tensor), tensor) for tensor in each._buffers.values() if tensor is not None)
        inner = [child for child in each._modules.values() if child is not None and id(child) not in seen]
        seen.update(map(id, inner))
        left += inner
    return list(parameters.values()), list(buffers.values())


def local(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` on this rank: the local shard of a DTensor, otherwise `tensor` itself."""
    if not torch.is_grad_enabled():
        # As `to_local` does then, without its wrappers, which cost more than a small op.
        return getattr(tensor, "_local_tensor", tensor)
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def memory_of(tensor: Tensor) -> Tensor:
    """Return the memory that `tensor`, or its part on this rank, shows, with versions of its own."""
    # Unlike `detach` this serves a DTensor whose memory is on another device than its mesh.
    memory: Tensor = getattr(tensor, "_local_tensor", tensor)
    found: Tensor = torch._C.TensorBase.data.__get__(memory)  # type: ignore[attr-defined]
    return found


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return `local` of each of `tensors`."""
    if torch.is_grad_enabled():
        return [local(each) for each in tensors]
    return [getattr(each, "_local_tensor", each) for each in tensors]
