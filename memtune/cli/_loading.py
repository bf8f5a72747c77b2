"""How a command that needs torch loads what it needs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """While inside, modules are loaded without garbage collections, and later ones leave out what is there in the end.

    It leaves hardly any garbage, but each collection looks through all that torch has made: a quarter of the time it takes.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collected:
            gc.enable()
