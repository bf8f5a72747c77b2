"""Threads that share a module: none runs its own code while another one captures it.

A capture (`runtime.capture`) puts fakes in the place of parameters and buffers for as long as it takes, so a thread that
evaluates the module meanwhile would compute with them.

Rule 1. Who looks up what was captured, or captures, has the lock: `with lock`. Who runs the module's own code is counted:
        `with lock.running()`; any number of threads may at once.
Rule 2. A capture begins when no other thread runs the module's code (`alone`); threads that come meanwhile wait for it.
Rule 3. Nobody waits for ever: where the others do not end within a minute, or wait for this thread in turn because it is in
        the module's code itself, there is no capture.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PATIENCE_S = 60.0


class CaptureLock:
    """The lock of one module; a copy of the module has one of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._running = Counter[int]()
        """By thread, how often it is in the module's own code."""
        self._waiting = 0
        """Threads that want to capture."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CaptureLock:
        return CaptureLock()

    def __reduce__(self) -> Any:
        return CaptureLock, ()

    def __enter__(self) -> None:
        self._changed.acquire()

    def __exit__(self, *_: object) -> None:
        self._changed.release()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the module's own code runs."""
        me = threading.get_ident()
        with self._changed:
            if me not in self._running:
                self._changed.wait_for(lambda: not self._waiting, _PATIENCE_S)  # else a capture would never have its turn
            self._running[me] += 1
        try:
            yield
        finally:
            with self._changed:
                self._running[me] -= 1
                if not self._running[me]:
                    del self._running[me]
                self._changed.notify_all()

    def is_alone(self) -> bool:
        """Whether no other thread runs the module's own code; for use with the lock held."""
        return not self._running.keys() - {threading.get_ident()}

    def wait_alone(self) -> bool:
        """Wait until no other thread runs the module's own code; others may capture meanwhile. False: it takes too long (Rule 3).

        For use with the lock held.
        """
        if self.is_alone():
            return True
        if threading.get_ident() in self._running:
            return False
        self._waiting += 1
        try:
            return bool(self._changed.wait_for(self.is_alone, _PATIENCE_S))
        finally:
            self._waiting -= 1
            self._changed.notify_all()
