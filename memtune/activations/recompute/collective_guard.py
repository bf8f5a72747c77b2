"""Guard that refuses the user's own collectives inside recomputed blocks, in the first run or the second.

A recording on one rank does not show a collective behind `if dist.is_initialized()`, or one that starts at
the tenth step. Here it raises before any data is exchanged twice.

The first run of a block has a visitor (`RefuseExchanges`), which sees every op that exchanges data between
ranks. A visitor costs time at every op, so later runs rely on kernels in front of the operators of `c10d`,
which cost about 20 µs per collective and nothing otherwise. They are registered before the first recomputed
block runs on several ranks. Functional collectives with autograd call `c10d` from below autograd, where those
kernels do not see them: they get kernels of their own. A torch version without `torch.library.get_kernel`
keeps the visitor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from memtune import refusals
from memtune.device import DISPATCH_KEYS
from memtune.errors import ApplyError
from memtune.runtime import OpVisitor

_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")
NAMESPACES = ("c10d", *_FUNCTIONAL)
"""Namespaces of ops that exchange data between ranks; memtune's own collectives may run again."""


class _Inside(threading.local):
    block = ""
    """The recomputed block that runs now; empty outside of such blocks."""


_inside = _Inside()
_GET_KERNEL: Callable[[Any, str], Any] | None = getattr(torch.library, "get_kernel", None)


class RefuseExchanges(OpVisitor):
    """Visitor that raises MT306 at an op that exchanges data between ranks."""

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Refuse the op if it exchanges data."""
        if func.namespace in NAMESPACES:
            raise _second_exchange_error(func)
        return NotImplemented


def is_on_ranks() -> bool:
    """Return whether this process can exchange data with other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def needs_visitor(is_first: bool) -> bool:
    """Return whether a run of a block needs `RefuseExchanges` besides `refused_in`, as its first run does."""
    return is_first or _GET_KERNEL is None


@contextmanager
def refused_in(name: str) -> Iterator[None]:
    """Raise MT306 in the kernels of collectives that the block `name` calls inside this context."""
    _kernels()
    before, _inside.block = _inside.block, name
    try:
        yield
    finally:
        _inside.block = before


@cache
def _kernels() -> tuple[torch.library.Library, ...]:
    """Register the kernels that refuse collectives, once per process."""
    import torch.distributed._functional_collectives  # registers its kernels: must run before ours

    libraries = {name: torch.library.Library(name, "IMPL") for name in NAMESPACES}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op = name.partition("::")
        if namespace == "c10d":
            libraries[namespace].impl(op, partial(_looked_at, _overload(namespace, op)), "Autograd")
        elif namespace in _FUNCTIONAL and _GET_KERNEL is not None:
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd"):
                _look_above(libraries[namespace], op, _overload(namespace, op), _GET_KERNEL)
    return (*libraries.values(),)


def _look_above(
    library: torch.library.Library, op: str, found: Any, get_kernel: Callable[[Any, str], Any]
) -> None:
    """Register a kernel per device key that raises inside a recomputed block, else calls the present one."""
    # A Python kernel registered for `Autograd`, which covers all devices, would hide a present Python kernel
    # under a dispatch mode: ours would then call itself.
    for key in (f"Autograd{device}" for device in DISPATCH_KEYS):
        library.impl(op, partial(_looked_at_above, found, get_kernel(found, key)), key, with_keyset=True)


def _overload(namespace: str, op: str) -> Any:
    name, _, overload = op.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _looked_at(op: Any, *args: Any, **kwargs: Any) -> Any:
    if _inside.block:
        raise _second_exchange_error(op)
    # Otherwise the call would dispatch to this kernel again.
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **kwargs)


def _looked_at_above(op: Any, kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Call autograd's own `kernel` of `op`; raise inside a recomputed block."""
    if _inside.block:
        raise _second_exchange_error(op)
    return kernel.call_boxed(keys, *args, **kwargs)


def _second_exchange_error(op: Any) -> ApplyError:
    return refusals.error_of(refusals.collective_runs_twice(op, _inside.block))
