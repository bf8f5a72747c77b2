"""Hooks on tensors that do not keep alive whom they call.

torch keeps a tensor's gradient hooks where Python's collector does not look: a hook whose owner holds the tensor would keep both,
and all that the owner holds, for the rest of the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor


def weakly(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Calls the bound `method` while its owner lives; somebody else must keep the owner, such as a hook of the optimizer."""
    found = weakref.WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        there = found()
        if there is not None:
            there(tensor)

    return hook
