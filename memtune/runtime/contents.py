"""What containers and objects hold, a few levels deep, so that it can be compared later and put back."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_MOST_ITEMS = 4096
"""Of a container that is looked at."""
_MOST_HELD = 20_000
"""Containers and objects that are looked at."""
_LEVELS = 4
_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)
"""Containers that can change; the first that fits does the work, so that what derives from it is not asked."""
_OTHERS = frozenset({"torch", "memtune", "queue", "threading", "multiprocessing", "concurrent", "asyncio"})
"""Packages whose objects are not looked into: they are no model's, or another thread may change them meanwhile."""
_NO_HOLDERS = (nn.Module, Tensor, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, logging.Logger)


@dataclass(frozen=True, eq=False)
class Content:
    """What one container, or the dictionary of one object, held."""

    root: str
    """What it was found under."""
    held: Any
    kind: Any
    items: Any
    """A list of its items, of pairs for a dictionary."""

    def is_changed(self) -> bool:
        """Whether it holds anything else now; items are compared by identity."""
        now, before = _items(self.held, self.kind), self.items
        if len(now) != len(before):
            return True
        if issubclass(self.kind, dict):
            return any(one[0] is not two[0] or one[1] is not two[1] for one, two in zip(now, before, strict=True))
        return any(one is not two for one, two in zip(now, before, strict=True))

    def put_back(self) -> None:
        """Give it the items that it had, in their order."""
        self.kind.clear(self.held)
        (self.kind.update if issubclass(self.kind, dict | set) else self.kind.extend)(self.held, self.items)


def contents_of(roots: Iterable[tuple[str, Any]]) -> list[Content]:
    """Every container, and every object with attributes, that is one of `roots` or in one, each once.

    Modules, tensors, loggers, classes, functions, `_OTHERS`, and what is large are not looked into.
    """
    found: dict[int, Content] = {}
    waiting = [(name, value, 0) for name, value in roots]
    while waiting and len(found) < _MOST_HELD:
        root, value, level = waiting.pop()
        if level and isinstance(value, tuple):
            waiting += [(root, each, level + 1) for each in value] if level < _LEVELS and len(value) <= _MOST_ITEMS else []
            continue
        held = _held_of(value)
        kind = next((each for each in _KINDS if isinstance(held, each)), None)
        if kind is None or id(held) in found or len(held) > _MOST_ITEMS:
            continue
        content = found[id(held)] = Content(root, held, kind, _items(held, kind))
        if level < _LEVELS:
            inside = (item[1] for item in content.items) if issubclass(kind, dict) else content.items
            waiting += [(root, each, level + 1) for each in inside]
    return list(found.values())


def has_attributes(value: Any) -> bool:
    """Whether `value` is an object that may hold settings."""
    return not isinstance(value, _NO_HOLDERS) and hasattr(value, "__dict__")


def _held_of(value: Any) -> Any:
    """The container that `value` is, or the dictionary of its attributes."""
    if isinstance(value, _KINDS):
        return value
    is_other = type(value).__module__.split(".")[0] in _OTHERS
    return None if is_other or not has_attributes(value) else vars(value)


def _items(held: Any, kind: Any) -> list[Any]:
    return list(kind.items(held)) if issubclass(kind, dict) else list(kind.__iter__(held))
