"""Plain Python data that a module's code can read: attributes, class attributes and globals, compared before
each run.

The names that are read are taken from the code that `forward` can reach by name: other methods, functions of
its file. Numbers, strings and other plain values are compared wherever they are; other objects only under
names that this code reads. Lists, dicts and sets are compared by value, functions and other objects by
identity, and tensors not at all, because a tensor that is neither a parameter nor a buffer cannot be
captured.
"""

from __future__ import annotations

import dis
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set as AbstractSet
from functools import partial
from operator import is_, itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from memtune.runtime import ForwardWrapper

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
"""Types whose values are compared with `==`."""
_MOST_ITEMS, _LEVELS = 256, 8
"""Largest container whose items are compared by value at each step, and how deep; others by identity."""
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)
_NO_HOLDERS = (
    nn.Module,
    Tensor,
    type,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    ModuleType,
    logging.Logger,
)
"""Types whose attributes are no settings."""
GONE = object()
"""Value of a name that a dictionary does not have."""
_OURS = ("torch.", "memtune.")


class _Copy(NamedTuple):
    """Snapshot of a container."""

    kind: type
    base: Any
    """The builtin type whose methods read it, because a subclass may define others."""
    items: list[Any] | frozenset[Any]
    """Of a dictionary (key, value) pairs."""


class _Array(NamedTuple):
    """Snapshot of an array of numpy."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    content: bytes


class _Seen:
    """Some entries of a dictionary, compared with their values at construction.

    Args:
        held: The dictionary.
        names: The entries, also those that it does not have.
        noticed: Names that must not be added to it; None if additions have no effect.
    """

    def __init__(
        self, held: Mapping[str, Any], names: list[str], noticed: frozenset[str] | None = None
    ) -> None:
        self._absent = [name for name in names if name not in held]
        values = {name: _copied(held[name]) for name in names if name in held}
        self._held, self._noticed, self._keys = held, noticed, tuple(held) if noticed is not None else ()
        self._fixed = [name for name, value in values.items() if not isinstance(value, _Copy | _Array)]
        self._values = [values[name] for name in self._fixed]
        self._copies = [(name, value) for name, value in values.items() if isinstance(value, _Copy | _Array)]
        self._read: Callable[[Any], tuple[Any, ...]] = (
            itemgetter(*self._fixed, *self._fixed[:1]) if self._fixed else _no_sources
        )
        # The first name is read twice, because `itemgetter` of a single name returns no tuple.
        self._again = [*self._values, *self._values[:1]]

    def changed(self) -> str:
        """Return a description of the first change, '' if there is none."""
        held = self._held
        try:
            # One C-level pass for the common case; the loop below names the change.
            fixed = all(map(is_, self._read(held), self._again))
        except KeyError:
            fixed = False
        if not fixed:
            for name, value in zip(self._fixed, self._values, strict=True):
                if not _same(held.get(name, GONE), value):
                    return _describe_change(name, held.get(name, GONE), value)
        for name, copy in self._copies:
            if not _same(held.get(name, GONE), copy):
                return f"the content of {name} has changed"
        if any(map(held.__contains__, self._absent)):
            return f"{next(name for name in self._absent if name in held)} is new"
        if self._noticed is not None and tuple(held) != self._keys:
            added = self._noticed.intersection(held).difference(self._keys)
            if added:
                return f"{min(added)} is new"
        return ""


def visible_data(module: nn.Module) -> list[_Seen]:
    """Return all data that the code of `module` and of its submodules can read, with the current values."""
    modules = list(module.modules())
    kinds = list(
        dict.fromkeys(
            kind for each in modules for kind in type(each).__mro__ if kind not in (nn.Module, object)
        )
    )
    read, scopes = _read_names([*map(vars, kinds), *map(vars, modules)])
    found: list[_Seen] = []
    known: set[int] = set()

    def see(held: Mapping[str, Any], omitted: frozenset[str] = frozenset()) -> None:
        names = [
            name
            for name, value in held.items()
            if name not in omitted and name[:2] != "__" and (name in read or _is_plain(value))
        ]
        found.append(_Seen(held, names, read - omitted))

    for each in modules:
        for held in (vars(each), *_settings(each)):
            if id(held) not in known:
                known.add(id(held))
                # The region replaces the module's own `forward`, which is therefore no change.
                see(held, _OF_MODULES | {"forward"} if each is module else _OF_MODULES)
    for kind in kinds:
        see(vars(kind))
    return found + [_Seen(scope, names) for scope, names in scopes]


def named_data(
    module: nn.Module, names: AbstractSet[str], places: Iterable[tuple[Mapping[str, Any], list[str]]]
) -> list[_Seen]:
    """Return the data under `names` in the modules, and in each of `places` those under its own names."""
    own = (
        _Seen(held, [name for name in held if name in names and name not in _OF_MODULES | {"forward"}])
        for held in (vars(each) for each in module.modules())
    )
    return [*own, *(_Seen(held, under) for held, under in places if under)]


class WritablePlace(NamedTuple):
    """Place where code may set names."""

    holder: Any
    """Globals of a file (a dict), a class, or an imported file."""
    names: frozenset[str] | None
    """Names that it may set there; None for any."""


def writable_places(module: nn.Module) -> list[WritablePlace]:
    """Return the places outside modules' own attributes that the code of `module` can read and so could set.

    These are globals, by the names that the code reads or sets; classes; and attributes that it sets of
    imported files.
    """
    modules = list(module.modules())
    kinds = list(
        dict.fromkeys(
            kind for each in modules for kind in type(each).__mro__ if kind not in (nn.Module, object)
        )
    )
    sets = _Sets({}, set())
    _, scopes = _read_names([*map(vars, kinds), *map(vars, modules)], sets)
    found = [WritablePlace(kind, None) for kind in kinds if not kind.__module__.startswith(_OURS)]
    for scope, names in scopes:
        found.append(WritablePlace(scope, frozenset(names) | sets.globals[id(scope)]))
        files = (scope[name] for name in names if isinstance(scope[name], ModuleType))
        found += [
            WritablePlace(vars(each), frozenset(sets.attributes))
            for each in files
            if not each.__name__.startswith(_OURS)
        ]
    return found


class _Sets(NamedTuple):
    """Names that code sets."""

    globals: dict[int, set[str]]
    """By the id of the dictionary."""
    attributes: set[str]


def _read_names(
    places: list[Mapping[str, Any]], sets: _Sets | None = None
) -> tuple[frozenset[str], list[tuple[dict[str, Any], list[str]]]]:
    """Return the names that reachable code reads, and the globals that it reads; add the names that it sets
    to `sets`.

    Reachable is the code among `places` that `forward` can reach by name.
    """
    read, done = {"forward"}, set[int]()
    scopes: dict[int, tuple[dict[str, Any], list[str]]] = {}
    methods: dict[str, list[FunctionType]] = {}
    for held in places:
        for name, value in held.items():
            methods.setdefault(name, []).extend(_functions(value))
    waiting = [
        each
        for name in ("forward", "__getattr__", "__getattribute__", "__call__")
        for each in methods.get(name, ())
    ]
    while waiting:
        function = waiting.pop()
        if id(function) in done:
            continue
        done.add(id(function))
        scope = function.__globals__
        for name in _names(function.__code__):
            if name not in read:
                read.add(name)
                # Any class's method of that name: the receiver's type is not known.
                waiting += methods.get(name, ())
        # Libraries' own globals are no settings of the model.
        if function.__module__.startswith(_OURS):
            continue
        if sets is not None:
            sets.globals.setdefault(id(scope), set()).update(
                names_in_bytecode(function.__code__, "STORE_GLOBAL", "DELETE_GLOBAL")
            )
            sets.attributes.update(names_in_bytecode(function.__code__, "STORE_ATTR", "DELETE_ATTR"))
        _, names = scopes.setdefault(id(scope), (scope, []))
        for name in names_in_bytecode(function.__code__, "LOAD_GLOBAL", "LOAD_NAME"):
            if name in scope and name not in names:
                names.append(name)
                waiting += [each for each in _functions(scope[name]) if each.__globals__ is scope]
    return frozenset(read), list(scopes.values())


def _functions(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that run when `value` is called or read, including those that they wrap."""
    if isinstance(value, ForwardWrapper):
        value = value.__wrapped__
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    # Bounded: a decorator may wrap itself in a circle.
    for _ in range(8):
        if not isinstance(value, FunctionType):
            return
        yield value
        value = getattr(value, "__wrapped__", None)


def nested_code(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and the code of what is defined in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from nested_code(each)


def _names(code: CodeType) -> Iterator[str]:
    """Yield attributes that `code` may read, including those read by `getattr`."""
    for each in nested_code(code):
        yield from each.co_names
        # `getattr(self, "name")` has the name among the constants.
        yield from (const for const in each.co_consts if isinstance(const, str) and const.isidentifier())


def names_in_bytecode(code: CodeType, *ops: str) -> Iterator[str]:
    """Yield the names that are arguments of the bytecode instructions `ops` of `code`."""
    for each in nested_code(code):
        yield from (str(step.argval) for step in dis.get_instructions(each) if step.opname in ops)


def _settings(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the attributes of objects that a module holds, such as its config."""
    for name, value in vars(module).items():
        if name[:1] != "_" and has_attributes(value):
            yield vars(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (
        isinstance(value, tuple) and len(value) < _MOST_ITEMS and all(map(_is_plain, value))
    )


def _copied(value: Any, level: int = 0) -> Any:
    """Return `value`, copied if it can change while its identity stays the same."""
    if isinstance(value, Tensor):
        # Tensors are guarded as parameters and buffers, or refused by the capture.
        return Tensor
    if isinstance(value, np.ndarray):
        return value if value.dtype.hasobject else _Array(value.dtype, value.shape, value.tobytes())
    base = next((each for each in _CONTAINERS if isinstance(value, each)), None)
    if base is None or level == _LEVELS or _is_plain(value):
        return value
    if base in (set, frozenset):
        return _Copy(type(value), base, frozenset(value))
    copy = partial(_copied, level=level + 1) if base.__len__(value) <= _MOST_ITEMS else _itself
    if base is dict:
        return _Copy(type(value), base, [(key, copy(each)) for key, each in dict.items(value)])
    return _Copy(type(value), base, [copy(each) for each in base.__iter__(value)])


def _itself(value: Any) -> Any:
    return value


def _same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if before is Tensor:
        return isinstance(now, Tensor)
    if isinstance(before, _Array):
        return isinstance(now, np.ndarray) and _copied(now) == before
    if not isinstance(before, _Copy):
        return type(now) is type(before) and (_is_plain(now) and _equal(now, before))
    base = before.base
    if type(now) is not before.kind or base.__len__(now) != len(before.items):
        return False
    if base in (set, frozenset):
        return bool(base.__eq__(now, before.items))
    if base is dict:
        # In order: code may loop over it. Keys of one kind may define another comparison.
        items: Callable[[Any], Iterable[tuple[Any, Any]]] = dict.items
        return all(
            (key is known or (_is_plain(key) and _same(key, known))) and _same(each, value)
            for (key, each), (known, value) in zip(items(now), before.items, strict=True)
        )
    return all(map(_same, base.__iter__(now), before.items))


def _equal(now: Any, before: Any) -> bool:
    """Compare plain data of one type; 1, True and 1.0 differ within tuples too."""
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_same, now, before))
    return bool(now == before)


def _no_sources(_: Any) -> tuple[Any, ...]:
    return ()


def _describe_change(name: str, now: Any, before: Any) -> str:
    if not _is_plain(before) or not _is_plain(now):
        return f"{name} is another object"
    return f"{name} is {now!r}, was {before!r}"


def has_attributes(value: Any) -> bool:
    """Return whether `value` is an object that may hold settings."""
    return not isinstance(value, _NO_HOLDERS) and hasattr(value, "__dict__")
