"""What a block was called with, for its second run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from memtune.runtime.moved import Moved


def once_each(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`convert` that makes one object of one: a forward may ask whether two of its inputs are the same (attention does)."""
    made: dict[int, tuple[Any, Any]] = {}

    def converted(value: Any) -> Any:
        if id(value) not in made:
            made[id(value)] = value, convert(value)  # `value` stays alive, or another could have its id
        return made[id(value)][1]

    return converted


def as_input(value: Any) -> Any:
    """An input of the second run: same bytes, a leaf of its own graph."""
    if isinstance(value, Moved):
        return value.get().detach().requires_grad_(value.view.requires_grad)
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value
