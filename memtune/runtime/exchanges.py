"""Collectives of the user's own inside what would run a second time: found in the first run, before anything has been trained.

What a recording cannot show (a collective behind `if dist.is_initialized()`) shows here: the ops that pass the dispatcher.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from memtune.errors import ApplyError
from memtune.runtime.watching import WatchingMode

NAMESPACES = ("c10d", "_c10d_functional")
"""Of ops by which ranks exchange data; the seam's own are made for being run again."""


class _NoExchange(WatchingMode):
    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in NAMESPACES:
            raise ApplyError(
                f"{func} runs inside {self._name}: a second run would exchange data between ranks again.",
                fix="move it out of the block, or choose recompute: {kind: none}",
                code="MT306",
            )
        return func(*args, **(kwargs or {}))


def refused_in(name: str) -> AbstractContextManager[Any]:
    """Raises MT306 at a collective that is called inside, on behalf of the block `name`; nothing where there is one rank."""
    talks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return _NoExchange(name) if talks else nullcontext()
