"""Lines for people on a terminal: its width, whole words, one line for a command to copy."""

from __future__ import annotations

import fcntl
import io
import os
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from memtune import cli
from memtune.cli._output import folded
from memtune.errors import UsageError

LINE = "recompute            recomputes every block in backward, keeps optimizer state on the host"


@contextmanager
def terminal(columns: int) -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """Yield a stream to a terminal of that width, and a function that returns what it shows."""
    mine, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(its, "w") as stream:

        def shown() -> str:
            stream.flush()
            return os.read(mine, 1 << 16).decode().replace("\r\n", "\n")

        yield stream, shown
    os.close(mine)


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_folded_breaks_between_words_and_indents(columns: int) -> None:
    with terminal(columns) as (stream, _):
        first, *more = folded(LINE, stream, 21).splitlines()
    assert all(len(line) <= columns for line in (first, *more))
    assert all(line.startswith(" " * 21) for line in more)
    assert " ".join([first, *(line.strip() for line in more)]) == LINE
    assert bool(more) == (columns < len(LINE))


def test_folded_leaves_lines_off_a_terminal_and_on_a_tiny_one() -> None:
    assert folded(LINE, io.StringIO(), 21) == LINE
    with terminal(30) as (stream, _):
        assert folded(LINE, stream, 21) == LINE


def test_error_folds_all_but_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"memtune search model.py --freeze {'recompute=full,' * 8}"
    error = UsageError(LINE, evidence=LINE, fix=command, code="MT100")
    with terminal(60) as (stream, shown):
        monkeypatch.setattr("sys.stderr", stream)
        cli._print_error(error, as_json=False)
        lines = shown().splitlines()
    assert lines[-1] == f"      Fix: {command}"
    assert len(lines) == 5  # two of the message, two of the evidence
    assert all(len(line) <= 60 for line in lines[:-1])
