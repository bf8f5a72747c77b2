"""Progress of long phases: written by the work, shown by a display in another thread.

Deep code calls `advance` without knowing who listens; without a listener it costs one lookup.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TextIO

from memtune.units import format_seconds

SILENT_S = 1.5
"""Seconds after which a sign of life is due; a busy machine may take half a second more."""
_REDRAW_S = 0.25
_LEFT_AFTER_S = 1.0
"""Seconds of a phase after which its rate says how long it will take."""


class Progress:
    """The phase that runs now, and the work done in it."""

    def __init__(self, heading: str = "") -> None:
        self.heading = heading
        """Model, devices, limit and goal: the first thing that a display shows."""
        self._began_s = time.monotonic()
        self.text, self.noun = "", ""
        self.done, self.total = 0, 0
        self._base, self._advanced_s = (0, self._began_s), self._began_s
        self.finished: list[str] = []
        """Lines of finished phases that no display has taken yet."""

    def phase(self, text: str) -> None:
        """Begin a phase, which ends the one before; without a text nothing begins."""
        if self.text:
            self.finished.append(f"{self.text}{self._count()} · {_spent(self.elapsed_s())}")
        self._began_s = time.monotonic()
        self.text, self.noun, self.done, self.total = text, "", 0, 0
        self._base, self._advanced_s = (0, self._began_s), self._began_s

    def advance(self, done: int, noun: str, total: int) -> None:
        """Set the work done in the present phase."""
        now_s = time.monotonic()
        if self.total not in (0, total):  # more work turned up, which may have another pace
            self._base = self.done, now_s
        if done != self.done:
            self._advanced_s = now_s
        self.done, self.noun, self.total = done, noun, total

    def end(self) -> None:
        """End the last phase."""
        self.phase("")

    def elapsed_s(self) -> float:
        """Return seconds since the phase began."""
        return time.monotonic() - self._began_s

    def detail(self) -> str:
        """Return the work done, the time spent and, if the total is known, the time left."""
        elapsed_s, left = self.elapsed_s(), ""
        (before, since_s), now_s = self._base, time.monotonic()
        if self.total > self.done > before and elapsed_s > _LEFT_AFTER_S:
            left_s = (now_s - since_s) * (self.total - self.done) / (self.done - before)
            # A piece that takes long now will hardly end at once.
            left = f", about {_spent(max(left_s, now_s - self._advanced_s))} left"
        return f"{self._count()} · {elapsed_s:.0f} s{left}"

    def _count(self) -> str:
        if not self.done:
            return ""
        one = (self.total or self.done) == 1
        noun = re.sub(r"s\b", "", self.noun, count=1) if one else self.noun
        return f" · {self.done:,}{f' of {self.total:,}' if self.total else ''} {noun}".rstrip()


def _spent(seconds: float) -> str:
    """Return `0.3 s`, `15 s` or `4:07`: the time of a phase, which is no measurement."""
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s" if seconds < 60 else format_seconds(seconds)


_LISTENER: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextlib.contextmanager
def reported_to(progress: Progress) -> Iterator[None]:
    """Send the progress of work inside this context, in this thread, to `progress`."""
    token = _LISTENER.set(progress)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def advance(done: int, noun: str, total: int = 0) -> None:
    """Report the work done so far in the present phase; `total` 0 if it is unknown."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.advance(done, noun, total)


class StatusLine:
    """One line about the present, below lines that stay.

    On a terminal it is redrawn in place. Elsewhere its subject begins a line, to which a dot is appended
    within two seconds, or the new parts of the detail each time that twice as long has passed, so that a log
    shows life without a line per sign of it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self.redraws = stream, stream.isatty()
        self._subject, self._detail, self._written_s, self._open = "", "", 0.0, False
        self._opened_s = self._reported_s = 0.0

    def show(self, subject: str, detail: str) -> None:
        """Show `subject` and `detail` as the present."""
        now_s = time.monotonic()
        if self.redraws:
            width = columns(self._stream)
            self._write(f"\r{f'{subject}{detail}'[: width - 1]:<{width - 1}}")  # blanks need no escapes
            self._open = True
        elif subject != self._subject or not self._open:
            self.close()
            self._write(subject)
            self._open, self._written_s, self._detail = True, now_s, ""
            self._opened_s = self._reported_s = now_s
        elif now_s - self._written_s >= SILENT_S:
            known, new = self._detail.split(" · "), list[str]()
            if now_s - self._opened_s >= 2 * (self._reported_s - self._opened_s):
                new = [each for each in detail.split(" · ") if each and each not in known]
            if new:
                self._reported_s, self._detail = now_s, detail
            self._write("".join(f" · {each}" for each in new) or ".")
            self._written_s = now_s
        self._subject = subject

    def finish(self, line: str) -> None:
        """Print the line of a finished phase, which begins with its subject."""
        if self._open and not self.redraws and line.startswith(self._subject):
            self._write(line[len(self._subject) :] + "\n")
            self._open = False
        else:
            self.print(line)

    def print(self, line: str) -> None:
        """Print a line that stays."""
        self.close()
        self._write(line + "\n")

    def close(self) -> None:
        """Remove the line from a terminal, end it elsewhere; the next `show` begins another."""
        if self._open:
            self._write(f"\r{' ' * (columns(self._stream) - 1)}\r" if self.redraws else "\n")
            self._open = False

    def _write(self, text: str) -> None:
        # A closed pipe (`| head`) must not end work that has run for hours.
        with contextlib.suppress(BrokenPipeError):
            self._stream.write(text)
            self._stream.flush()


class _PrintedOnce(io.TextIOBase):
    """Stdout of user code while a status line is shown."""

    # Whole lines, each once, since `model()` and `loss()` are called several times.

    def __init__(self, status: StatusLine, stream: TextIO) -> None:
        self._status, self._stream = status, stream
        self._rest, self._seen = "", set[str]()

    def write(self, text: str) -> int:
        """Write the lines that `text` completes and that were not written before."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line not in self._seen:
                self._seen.add(line)
                self._status.close()
                self._stream.write(line + "\n")
                self._stream.flush()
        return len(text)

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the file descriptor of stdout itself."""
        return self._stream.fileno()

    def __getattr__(self, name: str) -> Any:
        # `buffer`, `reconfigure` and others that the base class lacks.
        return getattr(self._stream, name)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of stdout itself."""
        return self._stream.encoding

    def finish(self) -> None:
        """Write a last line without an end."""
        if self._rest:
            self.write("\n")


@contextlib.contextmanager
def prints_kept_apart(status: StatusLine) -> Iterator[None]:
    """Keep lines that user code prints apart from the line of `status`, and print repeated ones once."""
    printed = _PrintedOnce(status, sys.stdout)
    with contextlib.redirect_stdout(printed):
        try:
            yield
        finally:
            printed.finish()


def columns(stream: TextIO) -> int:
    """Return the width of a terminal, 80 if it does not say."""
    import os

    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 80


@contextlib.contextmanager
def shown(progress: Progress, stream: TextIO) -> Iterator[None]:
    """Show `progress` on `stream` while this context lasts; each finished phase leaves a line."""
    over, status = threading.Event(), StatusLine(stream)

    def draw() -> None:
        for line in drain(progress):
            status.finish(line)
        if progress.text:
            status.show(progress.text, progress.detail())

    def follow() -> None:
        while not over.wait(_REDRAW_S):
            draw()

    thread = threading.Thread(target=follow, name="memtune-progress", daemon=True)
    thread.start()
    try:
        with reported_to(progress), prints_kept_apart(status):
            yield
    finally:
        over.set()
        thread.join()
        progress.end()
        draw()
        status.close()


@contextlib.contextmanager
def shown_phase(text: str, stream: TextIO) -> Iterator[None]:
    """Show one phase on `stream` while this context lasts, such as imports that take seconds."""
    progress = Progress()
    progress.phase(text)
    with shown(progress, stream):
        yield


def drain(progress: Progress) -> list[str]:
    """Return the lines of phases that finished since the last call."""
    lines = []
    while progress.finished:
        lines.append(progress.finished.pop(0))
    return lines
