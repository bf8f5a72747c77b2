"""Lock for modules that several threads share: no thread runs a module's code while another thread captures
it.

A capture (`activations.capture.region_capture`) replaces parameters and buffers by fake tensors while it
runs, so a thread that evaluates the module meanwhile would compute with them.

- A thread that captures, or looks up captures, holds the lock (`with lock`). A thread that runs the module's
  own code is counted (`with lock.running()`); any number of threads may run it.
- A capture begins when no other thread runs the module's code; threads that want to run it meanwhile wait.
- No thread waits for ever: there is no capture if the others do not end within a minute, or if this thread
  runs the module's code itself, so that others may wait for it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PATIENCE_S = 60.0


class CaptureLock:
    """Lock of one module; a copy of the module gets a lock of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._running = Counter[int]()
        """By thread: nesting depth in the module's own code."""
        self._waiting = 0
        """Number of threads that wait to capture."""

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
        """Return a context in which the thread runs the module's own code."""
        me = threading.get_ident()
        with self._changed:
            if me not in self._running:
                # Without this wait, a steady flow of runs would postpone a capture for ever.
                self._changed.wait_for(lambda: not self._waiting, _PATIENCE_S)
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
        """Return whether no other thread runs the module's own code; call it with the lock held."""
        return not self._running.keys() - {threading.get_ident()}

    def wait_alone(self) -> bool:
        """Wait until no other thread runs the module's own code; return False if that takes too long.

        Call it with the lock held. It is released while waiting, so another thread may capture meanwhile.
        """
        if self.is_alone():
            return True
        if threading.get_ident() in self._running:
            return False  # others may wait for this thread's run to end: a deadlock
        # Announced, so that threads that come later let the capture go first.
        self._waiting += 1
        try:
            return bool(self._changed.wait_for(self.is_alone, _PATIENCE_S))
        finally:
            self._waiting -= 1
            self._changed.notify_all()
