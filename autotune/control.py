"""What the user asks of a running search: pause, stop, interrupt, end a trial. Written by a display, read by the search."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Control:
    """Thread-safe wishes; the search looks at them between two events and says in the event log what it did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paused = self._stopping = False
        self._exit_code = 0
        self._kills: list[int] = []

    @property
    def paused(self) -> bool:
        """No new trial is to be started; running ones go on."""
        return self._paused and not self._stopping

    @property
    def stopping(self) -> bool:
        """End running trials, keep the best so far, finish."""
        return self._stopping

    @property
    def interrupted(self) -> bool:
        """The stop came from Ctrl-C or a signal: the caller exits with `exit_code` after the best is written."""
        return self._exit_code != 0

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP, else 0."""
        return self._exit_code

    def pause(self, paused: bool = True) -> None:
        """Ask for a pause, or for its end."""
        with self._lock:
            self._paused = paused

    def stop(self) -> None:
        """Ask for an orderly end with the best so far; cannot be taken back."""
        with self._lock:
            self._stopping = True

    def interrupt(self, exit_code: int = 130) -> bool:
        """As `stop`, for Ctrl-C and signals. Returns whether this was the first time; a second one should end at once."""
        with self._lock:
            first = self._exit_code == 0
            self._stopping, self._exit_code = True, self._exit_code or exit_code
            return first

    def kill(self, number: int) -> None:
        """Ask for the end of one running trial."""
        with self._lock:
            self._kills.append(number)

    def take_kills(self) -> list[int]:
        """Trials to end, each returned once."""
        with self._lock:
            kills, self._kills = self._kills, []
            return kills

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """While inside: the first Ctrl-C, SIGTERM or SIGHUP asks for an orderly end, the second raises KeyboardInterrupt.

        Does nothing outside the main thread, where Python delivers no signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def caught(number: int, frame: FrameType | None) -> None:
            if not self.interrupt(128 + number):
                raise KeyboardInterrupt

        before = {number: signal.signal(number, caught) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
