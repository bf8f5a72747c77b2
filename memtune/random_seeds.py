"""Seeds and states of all random generators that a user's code may draw from: torch's, Python's and numpy's.

The states of Python and numpy take 0.1 ms to read. Whether they have changed since they were last read takes
2 µs: their words in memory are compared.
"""

from __future__ import annotations

import _random
import ctypes
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class PythonRandomState:
    """State of the generators of `random` and `numpy.random`."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> PythonRandomState:
        """Return the current state; the same object until something is drawn."""
        global _last
        words = _words()
        if words is not None and words == _last[0]:
            return _last[1]  # type: ignore[no-any-return]
        found = cls(random.getstate(), np.random.get_state(legacy=False))
        # A normal number that numpy has in stock is drawn without any change of the words.
        if not found.numpy["has_gauss"]:
            _last = words, found
        return found

    def is_now(self) -> bool:
        """Return True if nothing has been drawn since."""
        now = self.now()
        return now is self or pickle.dumps([now.python, now.numpy]) == pickle.dumps([self.python, self.numpy])

    def continue_from(self) -> None:
        """Draw from this state from now on."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


_last: tuple[Any, Any] = None, None
"""Words of the state that was read last, and it."""
_PYTHON = random.getstate.__self__  # type: ignore[attr-defined]
_PYTHON_AT = id(_PYTHON) + object.__basicsize__, _random.Random.__basicsize__ - object.__basicsize__
"""Address and bytes of its index and 624 words."""


def _words() -> tuple[bytes, Any, bytes] | None:
    """Return the words of both generators, None if numpy's is another one than it began with."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return None
    address = generator.ctypes.state_address  # of its 624 words and index
    return ctypes.string_at(*_PYTHON_AT), _PYTHON.gauss_next, ctypes.string_at(address, 625 * 4)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def preserved_random() -> Iterator[None]:
    """Restore the CPU generator of torch and those of Python and numpy when the context ends."""
    now = PythonRandomState.now()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        now.continue_from()
