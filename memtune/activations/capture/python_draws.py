"""Random draws in Python that a module's forward may make, found in its code.

A captured region does not run the module's Python code again, so a forward that first draws in a later step
(layer drop after a warm-up, augmentation of every tenth batch) would silently stop drawing. Running it once
cannot show such draws, but its code names the generators.
"""

from __future__ import annotations

import dis
import inspect
import random
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
from torch import nn

from memtune.activations.capture.executed_code import is_library
from memtune.activations.capture.guard_sources import nested_code
from memtune.runtime import is_python_generator


def draws_named_in(module: nn.Module, forward: Any) -> str:
    """Return the generator of Python or numpy that `forward`, of `module`, or a submodule's names, or ''."""
    seen = set[CodeType]()
    # An instance may have a forward of its own, which may be memtune's, in place of that of its class.
    every = ((of, each) for each in module.modules() for of in (each.forward, type(each).forward))
    return next((name for of, each in [(forward, module), *every] for name in _named_by(of, each, seen)), "")


def _named_by(value: Any, owner: Any, seen: set[CodeType]) -> Iterator[str]:
    """Yield the generators that the code of `value` names, and that of the functions and classes it names.

    Args:
        value: Any object; only functions, methods and classes outside of torch and numpy have such code.
        owner: The instance or class whose method it is.
        seen: Code that has been looked at.
    """
    if isinstance(value, (MethodType, staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    # Of libraries, torch's draws are ops, and a user's code names the generators of the others.
    if not isinstance(value, (type, FunctionType)) or is_library(value.__module__):
        return
    if isinstance(value, type):
        for each in vars(value).values():
            yield from _named_by(each, value, seen)
        return
    if value.__code__ in seen:
        return
    seen.add(value.__code__)
    outside = {**value.__globals__, **inspect.getclosurevars(value).nonlocals}
    for code in nested_code(value.__code__):
        for each in dis.get_instructions(code):
            name, found = each.argval, None
            if each.opname == "IMPORT_NAME" and name in ("random", "numpy.random"):
                yield name
            elif each.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
                found = outside.get(name)
            elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):  # of any object: one of them may be the owner
                found = inspect.getattr_static(owner, name, None)
            if _is_generator(found) and (found is not np or "random" in code.co_names):
                yield name
            yield from _named_by(found, owner, seen)


def _is_generator(value: Any) -> bool:
    """Return True for numpy, modules of generators, generators of Python and numpy, and their methods."""
    if isinstance(value, (MethodType, BuiltinFunctionType)):
        value = value.__self__
    return any(value is each for each in (random, np, np.random)) or is_python_generator(value)
