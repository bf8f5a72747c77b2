"""Data outside of a region's modules that the code which a capture has run could read.

A capture runs the region once, and whatever code it has run is observed: its globals, the cells of its
closures, its arguments, and what it names of these, attribute by attribute. Code that has not run is behind a
branch whose condition was read by code that has. Files of torch, numpy and the standard library are not
looked into, but for some state of the process that user code asks them for.
"""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memtune.activations.capture.guard_sources import GONE, names_in_bytecode, nested_code
from memtune.activations.capture.side_effects import Content, contents_of

_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "numpy", "memtune"),
    # Of torch's own code on fake tensors.
    *("sympy", "mpmath", "networkx", "optree", "typing_extensions", "triton", "filelock", "fsspec", "jinja2"),
}
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_LEAVES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, BuiltinFunctionType)
_CLOCKS = frozenset({"time", "datetime", "secrets", "uuid"})
_FILES = frozenset({"open", "input"})
_OF_PROCESS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("environ", "environb", "getenv"), lambda: dict(os.environ)),
    "argv": lambda: sys.argv,
    "initial_seed": torch.initial_seed,
    "get_num_threads": torch.get_num_threads,
}
"""Name by which code asks the process → what it gets."""
_ASKING = frozenset({"getattr", "hasattr"})
_OF_MODULES = (frozenset(vars(nn.Module())) | {"forward"}) - {"training"}


class View(MutableMapping[str, Any]):
    """Values that are no entries of a dictionary, by name: each with a function that returns it.

    Args:
        readers: Name → function; one that raises has no value now.
        write: Function that sets one.
    """

    def __init__(
        self, readers: Mapping[str, Callable[[], Any]], write: Callable[[str, Any], None] | None = None
    ) -> None:
        self._readers, self._write = readers, write

    def __getitem__(self, name: str) -> Any:
        try:
            return self._readers[name]()
        except (AttributeError, ValueError, LookupError) as error:
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        if self._write is not None:
            self._write(name, value)

    def __delitem__(self, name: str) -> None:
        """Keep it: none of these names is removed."""

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._readers if name in self])

    def __contains__(self, name: object) -> bool:
        try:
            self[str(name)]
        except KeyError:
            return False
        return True

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Code(NamedTuple):
    """Names in a function's code, and in that of what is defined in it."""

    names: frozenset[str]
    asked: frozenset[str]
    """Attributes that it may ask for by `getattr`."""
    loads: frozenset[str]
    """Globals."""
    sets: frozenset[str]
    """Variables of closures that it sets, among others."""


@dataclass
class Place:
    """A place outside of the region's modules, and the names that are read there."""

    held: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    """Values before the code ran; `GONE` for a name that it does not have."""


class ExecutedCode:
    """Code that runs in `observed`, and the data that it could read, as it was when the code began.

    Args:
        module: The region's module; what its modules hold is guarded by other means.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names: set[str] = set()
        """Attributes that the code names."""
        self.why = ""
        """Reason why the region cannot run without its code, such as a clock that it reads."""
        self._own = {id(each) for each in module.modules()}
        self._places: dict[Any, Place] = {}
        self._contents: dict[int, list[Content]] = {}
        self._known: dict[tuple[int, ...], Any] = {}
        self._inner: set[CodeType] = set()
        self._closures: list[tuple[CodeType, dict[str, Any], dict[str, Any]]] = []

    @property
    def places(self) -> list[Place]:
        """The places whose values the code could read."""
        return list(self._places.values())

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe this thread's code.

        Not under a debugger or another tracer, which has its place.
        """
        if sys.gettrace() is not None:
            yield
            return
        collects = gc.isenabled()
        gc.disable()  # callbacks and finalizers of other objects are no code of the region's
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
            if collects:
                gc.enable()
            self._watch_functions()

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or is_library(frame.f_globals.get("__name__")):
            return
        code, scope = frame.f_code, frame.f_globals
        values = frame.f_locals
        named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        # Not tensors: a reference would keep alive what the region frees.
        given = {name: values[name] for name in named if name in values and not _has_tensors(values[name])}
        key = (id(code), *map(id, given.values()))
        if key in self._known:
            return
        self._known[key] = code, given  # alive, so that no other object gets its id
        read = _code_of(code)
        self.names |= read.names
        outside = {name: scope[name] for name in read.loads if name in scope}
        free = {name: values[name] for name in code.co_freevars if name in values}
        self._watch(id(scope), scope, outside)
        self._watch(id(_PROCESS), _PROCESS, read.names & _OF_PROCESS.keys())
        # An argument may be a default, which belongs to the function.
        defaults = {name: value for name, value in given.items() if isinstance(value, _CONTAINERS)}
        self._inner.update(each for each in nested_code(code) if each is not code)
        # The cells of a function that another one defines and calls itself are locals of that one.
        closed = {} if code in self._inner else free
        for name, value in closed.items():
            self._snapshot(name, value)
        if closed or defaults:
            self._closures.append((code, closed, defaults))
        for name, value in [*outside.items(), *free.items()]:
            self._check(name, value)
        for name in _FILES & (read.loads - scope.keys()):
            self._note(f"reads a file, whose content may change: it names {name}")
        self._expand([*given.values(), *outside.values(), *free.values()], read)

    def _note(self, why: str) -> None:
        self.why = self.why or why

    def _check(self, name: str, value: Any) -> None:
        """Note a value that gives something else each time, and what asks the process under another name."""
        asks = "environ" if value is os.environ else getattr(value, "__name__", "")
        if asks in _OF_PROCESS and is_library(getattr(value, "__module__", "")):
            self._watch(id(_PROCESS), _PROCESS, [asks])
        owner = value.__self__ if isinstance(value, BuiltinFunctionType) else value
        file = owner.__name__ if isinstance(owner, ModuleType) else ""
        if isinstance(owner, FunctionType | type):
            file = owner.__module__
        if file in _CLOCKS:
            self._note(f"reads a clock or draws random numbers: it names {name}")
        elif hasattr(type(value), "__next__"):
            self._note(f"reads the iterator {name}, which gives something else each time")

    def _expand(self, roots: list[Any], read: _Code) -> None:
        """Watch what the code names of `roots`, and of what it finds there."""
        waiting, known = list(roots), dict[int, Any]()
        while waiting:
            value = waiting.pop()
            if isinstance(value, _LEAVES) or id(value) in known:
                continue
            known[id(value)] = value
            if isinstance(value, _CONTAINERS):
                inside = value.values() if isinstance(value, dict) else value
                # Registries have many classes and functions; the code of those that are used runs.
                waiting += (each for each in inside if not isinstance(each, type | FunctionType | ModuleType))
            elif isinstance(value, weakref.ReferenceType):
                waiting.append(value())
            elif isinstance(value, MethodType):
                waiting.append(value.__self__)
            elif isinstance(value, partial):
                given = {"a partial": [value.func, *value.args, *value.keywords.items()]}
                self._watch(id(given), given, given)
                waiting += given.values()
            elif isinstance(value, ContextVar):
                self._watch(id(value), View({value.name: value.get}), [value.name])
            else:
                waiting += self._found_in(value, read)

    def _found_in(self, value: Any, read: _Code) -> Iterator[Any]:
        """Watch what the code names of `value`, and yield it."""
        places = [*_places_of(value)]
        for name in read.names - _OF_MODULES:
            at = next((at for at, (_, held) in enumerate(places) if name in held), None)
            if at is None and (name not in read.asked or isinstance(value, FunctionType)):
                continue
            if id(value) not in self._own:
                for key, held in places if at is None else places[: at + 1]:  # one before may get it too
                    self._watch(key, held, [name])
            if at is not None:
                found = places[at][1][name]
                self._check(name, found)
                yield found

    def _watch(self, key: Any, held: Mapping[str, Any], names: Iterable[str]) -> None:
        # The place keeps alive what has the key's id.
        place = self._places.setdefault(key, Place(held))
        for name in names:
            if name not in place.values:
                self._keep(place, name, held.get(name, GONE))

    def _keep(self, place: Place, name: str, value: Any) -> None:
        place.values[name] = value
        self._snapshot(name, value)

    def _snapshot(self, name: str, value: Any) -> None:
        if id(value) not in self._contents and not isinstance(value, _LEAVES):
            self._contents[id(value)] = contents_of([(f"changes {name}, which belongs to no module", value)])

    def _watch_functions(self) -> None:
        """Watch the closures and defaults of functions that have run: a frame has their values alone."""
        codes = {code for code, *_ in self._closures}
        for function in gc.get_referrers(*codes) if codes else ():
            if isinstance(function, FunctionType):
                for code, free, given in self._closures:
                    if code is function.__code__:
                        self._watch_closure(function, free)
                        self._watch_defaults(function, given)
        self._closures.clear()

    def _watch_closure(self, function: FunctionType, values: Mapping[str, Any]) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        sets = _code_of(function.__code__).sets
        # Several functions may have the code, each with a closure of its own.
        if values and all(name in sets or _content(cells[name]) is value for name, value in values.items()):
            readers = {name: partial(_content, cell) for name, cell in cells.items()}
            place = self._places.setdefault(id(function), Place(View(readers, partial(_set, cells))))
            for name, value in values.items():
                if name not in place.values:
                    self._keep(place, name, value)

    def _watch_defaults(self, function: FunctionType, given: Mapping[str, Any]) -> None:
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for name, value in given.items():
            if any(value is each for each in defaults):
                self._watch(
                    ("default", id(value)), {f"the default of {name}": value}, [f"the default of {name}"]
                )

    def undo(self) -> str:
        """Restore what the code has changed; return a description, '' if it has changed nothing."""
        changed = ""
        for place in self._places.values():
            for name, value in place.values.items():
                if place.held.get(name, GONE) is not value and place.held is not _PROCESS:
                    changed = f"changes {name}, which belongs to no module"
                    _restore(place.held, name, value)
        for content in (each for found in self._contents.values() for each in found):
            if content.is_changed():
                content.put_back()
                changed = content.root
        return changed


_PROCESS = View(_OF_PROCESS)


def _places_of(value: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield the places where an attribute of `value` is looked up, in order, each with a key; not those of
    libraries.
    """
    if isinstance(value, ModuleType):
        if not is_library(value.__name__):
            yield id(vars(value)), vars(value)
        return
    kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
    if not isinstance(value, type):
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            yield id(held), held
        if isinstance(value, nn.Module):
            yield id(value._modules), value._modules
    slots = [] if isinstance(value, type | Tensor) else [name for kind in kinds for name in _slots_of(kind)]
    if slots:  # before the classes, which have descriptors of these names
        readers = {name: partial(getattr, value, name) for name in slots}
        yield ("slots", id(value)), View(readers, partial(setattr, value))
    for kind in kinds:
        if not is_library(kind.__module__):
            yield id(kind), vars(kind)


@lru_cache(maxsize=4096)
def _code_of(code: CodeType) -> _Code:
    every = list(nested_code(code))
    loads = frozenset(names_in_bytecode(code, "LOAD_GLOBAL", "LOAD_NAME"))
    constants = {each for one in every for each in one.co_consts if isinstance(each, str)}
    asked = frozenset(each for each in constants if each.isidentifier()) if loads & _ASKING else frozenset()
    names = frozenset(name for each in every for name in each.co_names) | asked
    return _Code(names, asked, loads, frozenset(names_in_bytecode(code, "STORE_DEREF")))


def is_library(module: Any) -> bool:
    """Return True for files of torch, numpy, the standard library and memtune, and for named tuples."""
    name = str(module)
    return name.partition(".")[0] in _LIBRARIES or name.startswith("namedtuple_")


def _has_tensors(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    return isinstance(value, Tensor) or (
        isinstance(value, _CONTAINERS) and any(isinstance(each, Tensor) for each in inside)
    )


def _content(cell: CellType) -> Any:
    return cell.cell_contents


def _set(cells: Mapping[str, CellType], name: str, value: Any) -> None:
    cells[name].cell_contents = value


def _restore(held: Mapping[str, Any], name: str, value: Any) -> None:
    if isinstance(held, MutableMapping | dict):
        if value is GONE:
            held.pop(name, None)
        else:
            held[name] = value


def _slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [each for each in slots if each[:2] != "__"]
