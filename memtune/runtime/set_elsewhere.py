"""What a forward sets that is of no module: a counter in a global, in a class, in a config that a module holds.

A capture runs the forward once more than training does, and writes down what followed from the values that it found.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from memtune.runtime.seen_data import written_by

_MOST_ITEMS = 4096
"""Of a container that is looked at."""
_CONTAINERS = frozenset({list, dict, OrderedDict, defaultdict, set})


@contextmanager
def nothing_set_elsewhere(module: nn.Module, error: type[Exception]) -> Iterator[None]:
    """Takes back what runs inside sets outside of modules, and raises `error` for it, unless something else was raised."""
    before = written_by(module)
    kept = [(name, value, _items(value), value.copy()) for _, attributes in before for name, value in attributes.items()
            if type(value) in _CONTAINERS and len(value) <= _MOST_ITEMS]  # fmt: skip
    changed = ""
    try:
        yield
    finally:
        for holder, attributes in before:
            now = holder if isinstance(holder, dict) else vars(holder)
            for name, value in attributes.items():
                if now.get(name) is not value:
                    changed = name
                    _set(holder, name, value)
        for name, value, items, copy in kept:
            now_items = _items(value)
            if len(items) != len(now_items) or any(one is not two for one, two in zip(items, now_items, strict=True)):
                changed = name
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(copy)
    if changed:
        raise error(f"its forward changes {changed}, which is of no module")


def _items(held: Any) -> list[Any]:
    return [each for pair in held.items() for each in pair] if isinstance(held, dict) else list(held)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
    else:
        setattr(holder, name, value)
