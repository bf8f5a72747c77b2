"""What a forward leaves behind: a counter in a global, in a class, in a config, in a container that a module holds.

A capture runs the forward once more than training does, and writes down what followed from the values that it found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from memtune.runtime.contents import Content, contents_of, has_attributes
from memtune.runtime.seen_data import Written, written_by

_GONE = object()


@contextmanager
def nothing_left(module: nn.Module, error: type[Exception]) -> Iterator[None]:
    """Takes back what runs inside leaves behind, and raises `error` for it, unless something else was raised.

    What attributes of modules hold is looked at here, the attributes themselves are not.
    """
    places = written_by(module)
    before = [_values(each) for each in places]
    roots = [(f"changes {name}, which is of no module", value) for values in before for name, value in values.items()]
    contents = contents_of([*_attributes(module), *roots])
    changed = ""
    try:
        yield
    finally:
        for place, values in zip(places, before, strict=True):
            changed = _taken_back(place, values) or changed
        for content in filter(Content.is_changed, contents):
            content.put_back()
            changed = content.root or changed
    if changed:
        raise error(f"its forward {changed}")


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What modules hold, and how to say that it was changed; not that at all where torch's own code does so."""
    for each in module.modules():
        for name, value in vars(each).items():
            is_own = name[:1] == "_" and (isinstance(value, dict) or has_attributes(value))
            if not is_own:
                is_flat = isinstance(each, nn.RNNBase) and name.startswith("_flat_weight")
                yield "" if is_flat else f"sets the attribute {name}", value


def _values(place: Written) -> dict[str, Any]:
    held = _dictionary(place)
    return {name: held.get(name, _GONE) for name in (_own_names(held) if place.names is None else place.names)}


def _own_names(held: Mapping[str, Any]) -> list[str]:
    return [name for name in held if name[:2] != "__"]


def _dictionary(place: Written) -> Mapping[str, Any]:
    return place.holder if isinstance(place.holder, dict) else vars(place.holder)


def _taken_back(place: Written, before: dict[str, Any]) -> str:
    """What was changed, '' if nothing was."""
    now, changed = _values(place), ""
    for name in {**before, **now}:
        value = before.get(name, _GONE)
        if now.get(name, _GONE) is not value:
            changed = f"changes {name}, which is of no module"
            _set(place.holder, name, value)
    return changed


def _set(holder: Any, name: str, value: Any) -> None:
    if not isinstance(holder, dict):
        delattr(holder, name) if value is _GONE else setattr(holder, name, value)
    elif value is _GONE:
        del holder[name]
    else:
        holder[name] = value
