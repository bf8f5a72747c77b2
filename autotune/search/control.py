"""The user's requests to a running search: pause, stop, interrupt, end a trial.

A display writes them, the search reads them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Control:
    """Thread-safe requests.

    The search reads them between two events and records its response in the event log.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused = self._stopping = False
        self._exit_code = 0
        self._begun = False
        self._kills: list[int] = []

    @property
    def paused(self) -> bool:
        """Return whether no new trial may start; running ones continue."""
        return self._paused and not self._stopping

    @property
    def stopping(self) -> bool:
        """Return whether to end running trials, keep the best so far and finish."""
        return self._stopping

    @property
    def interrupted(self) -> bool:
        """Return whether Ctrl-C or a signal caused the stop: the caller exits with `exit_code` in the end."""
        return self._exit_code != 0

    @property
    def exit_code(self) -> int:
        """Return 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, else 0."""
        return self._exit_code

    def pause(self, paused: bool = True) -> None:
        """Request a pause, or its end."""
        with self._lock:
            self._paused = paused

    def stop(self) -> None:
        """Request an orderly end with the best so far; cannot be revoked."""
        with self._lock:
            self._stopping = True

    @property
    def begun(self) -> bool:
        """Return whether trials have begun."""
        return self._begun

    def begin(self) -> None:
        """Record that trials begin: from now on an end keeps the best."""
        with self._lock:
            self._begun = True

    def interrupt(self, exit_code: int = 130) -> bool:
        """Request a `stop` because of Ctrl-C or a signal; return whether the search ends in order."""
        # Before the first trial there is nothing to keep, and after a second request there is no
        # time: the caller ends at once.
        with self._lock:
            first = self._exit_code == 0
            self._stopping, self._exit_code = True, self._exit_code or exit_code
            return first and self._begun

    def kill(self, number: int) -> None:
        """Request the end of one running trial."""
        with self._lock:
            self._kills.append(number)

    def take_kills(self) -> list[int]:
        """Return the trials to end, each once."""
        with self._lock:
            kills, self._kills = self._kills, []
            return kills

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Handle signals inside.

        The first Ctrl-C, SIGTERM or SIGHUP requests an orderly end; the second, or one before the first
        trial, raises KeyboardInterrupt.

        Does nothing outside the main thread, where Python delivers no signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def caught(number: int, frame: FrameType | None) -> None:
            if not self.interrupt(128 + number):
                raise KeyboardInterrupt

        before = {
            number: signal.signal(number, caught) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
