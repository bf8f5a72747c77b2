"""`load_state_dict` of the model itself, or of a part of it: whoever keeps a weight elsewhere hears of it.

The hooks are of the modules that hold the weights, so a load of any module above them is heard. A copy of the model, or one that
has been pickled, has no such hooks: nobody keeps its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from memtune.runtime.context import Context


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


def watch_loads(
    context: Context,
    kept: set[nn.Parameter],
    loaded: Callable[[list[nn.Parameter]], None],
    before: Callable[[], None] | None = None,
) -> None:
    """Have `loaded` called with those of `kept` whose module has got new weights.

    Args:
        context: Its model's modules are watched, and with a parameter what is held in its place (this rank's rows).
        kept: What is kept elsewhere.
        loaded: Called after each module's load, children before parents.
        before: Called before it.
    """
    for module in context.model.modules():
        held = (_of(context, kept, each) for each in module._parameters.values() if each is not None)
        mine = [each for each in held if each is not None]
        if not mine:
            continue
        if before is not None:
            module.register_load_state_dict_pre_hook(StaysBehind(before))
        module.register_load_state_dict_post_hook(StaysBehind(lambda mine=mine: loaded(mine)))  # type: ignore[misc]


def _of(context: Context, kept: set[nn.Parameter], parameter: nn.Parameter) -> nn.Parameter | None:
    held: nn.Parameter | None = parameter
    while held is not None and held not in kept:
        held = context.represented.get(held)
    return held
