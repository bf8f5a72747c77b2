"""Hooks that do not keep alive whom they call, and hooks that are no part of what is copied.

torch keeps a tensor's gradient hooks where Python's collector does not look, and `weakref.finalize` what it calls for as long as
the tensor lives: a hook whose owner holds the tensor would keep both, and all that the owner holds, for the rest of the process.

Copies of a model, and what is pickled of it, have its hooks, but nobody who keeps something of it elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ParamSpec

P = ParamSpec("P")


def weakly(method: Callable[P, None]) -> Callable[P, None]:
    """Calls the bound `method` while its owner lives; somebody else must keep the owner, such as a hook of the optimizer."""
    found = weakref.WeakMethod(method)

    def hook(*args: P.args, **kwargs: P.kwargs) -> None:
        there = found()
        if there is not None:
            there(*args, **kwargs)

    return hook


class StaysBehind:
    """A hook of a module: calls what it is given, without arguments; stays behind when the module is copied or pickled."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        """As torch calls any hook."""
        self._call()

    def __reduce__(self) -> Any:
        return _none, ()


def _none() -> Callable[..., None]:
    return _ignore


def _ignore(*_: Any) -> None:
    pass
