"""Load what a room exports at first use, so that importing a room costs nothing.

A room's `__init__.py` lists its exports as imports under `if TYPE_CHECKING:`, in the form that re-exports for
type checkers (`import Step as Step`, PEP 484). This module reads from them which file defines each name.
Passes, planners and worker processes can then import from a room without loading its runtime files, and with
them torch.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any


def open_door(room: str) -> Callable[[str], Any]:
    """Return a module `__getattr__` (PEP 562) that imports the exports of the package `room` at first use.

    Raises:
        AttributeError: From the returned function, for a name that the room does not export.
    """
    homes: dict[str, str] = {}

    def __getattr__(name: str) -> Any:
        if not homes:
            homes.update(read_exports(room))
        if name not in homes:
            # `from room import submodule` asks here first and falls back to the import system on this error.
            raise AttributeError(f"module '{room}' exports no '{name}'")
        try:
            home = importlib.import_module(homes[name])
        except AttributeError as error:
            # `from room import name` would report any AttributeError as a name that does not exist.
            raise ImportError(f"{homes[name]} could not be imported: {error}") from error
        value = home if homes[name] == f"{room}.{name}" else getattr(home, name)
        setattr(importlib.import_module(room), name, value)  # later uses find the name without this function
        return value

    return __getattr__


def read_exports(room: str) -> dict[str, str]:
    """Return the module of each name which `room` imports under `if TYPE_CHECKING:`."""
    spec = importlib.util.find_spec(room)
    if spec is None or spec.origin is None:
        raise ImportError(f"the room '{room}' has no source file")
    # Not `spec.loader.get_source`: the loader of an editable install returns no source.
    source = Path(spec.origin).read_text(encoding="utf-8")
    homes: dict[str, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for each in node.body:
                if isinstance(each, ast.ImportFrom) and each.module:
                    is_room = each.module == room
                    homes |= {
                        alias.name: f"{room}.{alias.name}" if is_room else each.module for alias in each.names
                    }
    return homes
