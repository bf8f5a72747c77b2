"""Undo side effects of a capture: a counter in a global, in a class, in a config, in a container of a module.

The content of containers and objects is snapshotted, a few levels deep, compared and restored.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from memtune.activations.capture.guard_sources import GONE, WritablePlace, has_attributes, writable_places

_MOST_SNAPSHOT_ITEMS = 4096
"""Largest container that is snapshotted."""
_MOST_HELD = 20_000
"""Most containers and objects that are snapshotted."""
_LEVELS = 4
_KINDS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)
"""Mutable containers; the first matching class does the work, so that overridden methods are not called."""
_OTHERS = frozenset({"torch", "memtune", "queue", "threading", "multiprocessing", "concurrent", "asyncio"})
"""Packages whose objects are not snapshotted: they belong to no model, or other threads change them."""


@dataclass(frozen=True, eq=False)
class Content:
    """Snapshot of the items of one container, or of one object's attributes."""

    root: str
    """Description of a change at the place where it was found."""
    held: Any
    kind: Any
    items: Any
    """List of its items; of pairs for a dictionary."""

    def is_changed(self) -> bool:
        """Return whether it holds other items now; items are compared by identity."""
        now, before = _items(self.held, self.kind), self.items
        if len(now) != len(before):
            return True
        if issubclass(self.kind, dict):
            return any(
                one[0] is not two[0] or one[1] is not two[1] for one, two in zip(now, before, strict=True)
            )
        return any(one is not two for one, two in zip(now, before, strict=True))

    def put_back(self) -> None:
        """Restore the items in their order."""
        self.kind.clear(self.held)
        (self.kind.update if issubclass(self.kind, dict | set) else self.kind.extend)(self.held, self.items)


def contents_of(roots: Iterable[tuple[str, Any]]) -> list[Content]:
    """Return a snapshot of every container, and every object with attributes, in or below `roots`, each once.

    Modules, tensors, loggers, classes, functions, objects of `_OTHERS`, and large containers are skipped.
    """
    found: dict[int, Content] = {}
    waiting = [(name, value, 0) for name, value in roots]
    while waiting and len(found) < _MOST_HELD:
        root, value, level = waiting.pop()
        # A tuple cannot change itself, but what it contains can.
        if level and isinstance(value, tuple):
            waiting += (
                [(root, each, level + 1) for each in value]
                if level < _LEVELS and len(value) <= _MOST_SNAPSHOT_ITEMS
                else []
            )
            continue
        held = _held_of(value)
        kind = next((each for each in _KINDS if isinstance(held, each)), None)
        if kind is None or id(held) in found or len(held) > _MOST_SNAPSHOT_ITEMS:
            continue
        content = found[id(held)] = Content(root, held, kind, _items(held, kind))
        if level < _LEVELS:
            inside = (item[1] for item in content.items) if issubclass(kind, dict) else content.items
            waiting += [(root, each, level + 1) for each in inside]
    return list(found.values())


def _held_of(value: Any) -> Any:
    """Return the container `value`, or the dictionary of its attributes."""
    if isinstance(value, _KINDS):
        return value
    is_other = type(value).__module__.split(".")[0] in _OTHERS
    return None if is_other or not has_attributes(value) else vars(value)


def _items(held: Any, kind: Any) -> list[Any]:
    return list(kind.items(held)) if issubclass(kind, dict) else list(kind.__iter__(held))


@contextmanager
def no_side_effects(module: nn.Module, error: type[Exception]) -> Iterator[None]:
    """Undo the side effects of the code inside this context; raise `error` for them unless an exception is
    raised already.

    Covers the contents of modules' attributes; the capture checks the attributes themselves.
    """
    places = writable_places(module)
    before = [_values(each) for each in places]
    roots = [
        (f"changes {name}, which belongs to no module", value)
        for values in before
        for name, value in values.items()
    ]
    contents = contents_of([*_attributes(module), *roots])
    changed = ""
    try:
        yield
    finally:
        for place, values in zip(places, before, strict=True):
            changed = _restore(place, values) or changed
        # After the names: a name may have pointed to another container, which is dropped by then.
        for content in filter(Content.is_changed, contents):
            content.put_back()
            changed = content.root or changed
    if changed:
        raise error(f"its forward {changed}")


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield changed attributes of modules with a description, '' for those that torch's code changes."""
    for each in module.modules():
        for name, value in vars(each).items():
            is_own = name[:1] == "_" and (isinstance(value, dict) or has_attributes(value))
            if not is_own:
                # torch's own list of the same weights, which it sets again at each assignment.
                is_flat = isinstance(each, nn.RNNBase) and name.startswith("_flat_weight")
                yield "" if is_flat else f"sets the attribute {name}", value


def _values(place: WritablePlace) -> dict[str, Any]:
    held = _dictionary(place)
    return {name: held.get(name, GONE) for name in (_own_names(held) if place.names is None else place.names)}


def _own_names(held: Mapping[str, Any]) -> list[str]:
    return [name for name in held if name[:2] != "__"]


def _dictionary(place: WritablePlace) -> Mapping[str, Any]:
    return place.holder if isinstance(place.holder, dict) else vars(place.holder)


def _restore(place: WritablePlace, before: dict[str, Any]) -> str:
    """Restore the names; return a description of a change, '' if there is none."""
    now, changed = _values(place), ""
    for name in {**before, **now}:
        value = before.get(name, GONE)
        if now.get(name, GONE) is not value:
            changed = f"changes {name}, which belongs to no module"
            _set(place.holder, name, value)
    return changed


def _set(holder: Any, name: str, value: Any) -> None:
    if not isinstance(holder, dict):
        delattr(holder, name) if value is GONE else setattr(holder, name, value)
    elif value is GONE:
        del holder[name]
    else:
        holder[name] = value
