"""Collectives of the user's own inside what would run a second time: an error at the moment one is called, in either run.

What a recording cannot show (a collective behind `if dist.is_initialized()`, or from the tenth step on) shows here, before
anything is exchanged twice.

Rule 1. The first run of a block passes a dispatch mode, which sees every op by which ranks exchange data.
Rule 2. After that a mode would cost time at every op. So a kernel in front of the operators of `c10d` looks from then on, which
        costs nothing but some 20 µs per collective. It is in place from the first recomputed block on, where ranks are several.
        Functional collectives that autograd knows reach `c10d` from below it, unseen: they have one in front of their own. A
        torch that cannot hand out the kernel that is there keeps the mode.
Rule 3. What runs below autograd is not the user's: the seam's collectives are made for being run again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from memtune.errors import ApplyError
from memtune.runtime.watching import WatchingMode

_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")
NAMESPACES = ("c10d", *_FUNCTIONAL)
"""Of ops by which ranks exchange data; the seam's own are made for being run again."""


class _Inside(threading.local):
    block = ""
    """That would run, or runs, a second time; '' outside of all."""


_inside = _Inside()
_GET_KERNEL: Callable[[Any, str], Any] | None = getattr(torch.library, "get_kernel", None)


class _NoExchange(WatchingMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in NAMESPACES:
            raise _twice(func)
        return func(*args, **(kwargs or {}))


def refused_in(name: str, *, first: bool = True) -> AbstractContextManager[Any]:
    """Raises MT306 at a collective that is called inside, on behalf of the block `name`; nothing where there is one rank.

    Args:
        name: Of the block.
        first: It is the block's first run (Rule 1).
    """
    talks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return _refused_in(name, first) if talks else nullcontext()


@contextmanager
def _refused_in(name: str, first: bool) -> Iterator[None]:
    _kernels()
    before, _inside.block = _inside.block, name
    try:
        with _NoExchange() if first or _GET_KERNEL is None else nullcontext():  # type: ignore[no-untyped-call]
            yield
    finally:
        _inside.block = before


@cache
def _kernels() -> tuple[torch.library.Library, ...]:
    """Rule 2: in place for as long as the process lives."""
    import torch.distributed._functional_collectives  # registers kernels, which would come too late

    libraries = {name: torch.library.Library(name, "IMPL") for name in NAMESPACES}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op = name.partition("::")
        if namespace == "c10d":
            libraries[namespace].impl(op, partial(_looked_at, _overload(namespace, op)), "Autograd")
        elif namespace in _FUNCTIONAL and _GET_KERNEL is not None:
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd"):
                _look_above(libraries[namespace], op, _overload(namespace, op), _GET_KERNEL)
    return (*libraries.values(),)


def _look_above(library: torch.library.Library, op: str, found: Any, get_kernel: Callable[[Any, str], Any]) -> None:
    """A kernel for each device by itself.

    In the place of `Autograd`, which stands for all, one in Python that is there would not be found any more when it is called
    under a dispatch mode: ours would call itself.
    """
    for key in ("AutogradCPU", "AutogradCUDA"):
        library.impl(op, partial(_looked_at_above, found, get_kernel(found, key)), key, with_keyset=True)


def _overload(namespace: str, op: str) -> Any:
    name, _, overload = op.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def _looked_at(op: Any, *args: Any, **kwargs: Any) -> Any:
    if _inside.block:
        raise _twice(op)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args, **kwargs)


def _looked_at_above(op: Any, kernel: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Autograd's own `kernel` of `op`, unless it would run twice."""
    if _inside.block:
        raise _twice(op)
    return kernel.call_boxed(keys, *args, **kwargs)


def _twice(op: Any) -> ApplyError:
    return ApplyError(
        f"{op} runs inside {_inside.block}: a second run would exchange data between ranks again.",
        fix="move it out of the block, or choose recompute: {kind: none}",
        code="MT306",
    )
