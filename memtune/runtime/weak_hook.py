"""Hooks on tensors that do not keep alive whom they call.

torch keeps a tensor's gradient hooks where Python's collector does not look, and `weakref.finalize` what it calls for as long as
the tensor lives: a hook whose owner holds the tensor would keep both, and all that the owner holds, for the rest of the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Calls the bound `method` while its owner lives; somebody else must keep the owner, such as a hook of the optimizer."""
    found = weakref.WeakMethod(method)

    def hook(*args: P.args, **kwargs: P.kwargs) -> None:
        there = found()
        if there is not None:
            there(*args, **kwargs)

    return hook
