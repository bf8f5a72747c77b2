"""Processes that measure kernel workspaces, forked from the server of `gloo.py` instead of started: each
would import torch, which takes longer than it measures.

tests/memory/test_workspace.py starts them as memtune does.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from support.gloo import FRESH

from memtune.memory import workspace

started = workspace._start_child
"""Starts a process as memtune does."""


def install() -> None:
    """Let `WorkspaceTable.fill_in_child` use a forked process in this process."""
    workspace._start_child = _Forked  # type: ignore[assignment]


class _Forked:
    """As the `subprocess.Popen` that `fill_in_child` uses."""

    def __init__(self) -> None:
        self._ours, theirs = FRESH.Pipe()
        self._process = FRESH.rank(target=_measure, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.returncode: int | None = None

    def __enter__(self) -> _Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def communicate(self, request: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Return the table and what the process said."""
        answer = "", ""
        with contextlib.suppress(OSError, EOFError):  # it is killed, or has died
            if request is not None:
                self._ours.send(request)
                if not self._ours.poll(timeout):
                    raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
                answer = self._ours.recv()
        self._end()
        return answer

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def _end(self) -> None:
        self._ours.close()  # a process without a request ends
        self._process.join()
        self.returncode = self._process.exitcode


def _measure(theirs: Connection[Any, Any]) -> None:
    try:
        sys.stdin = io.StringIO(theirs.recv())
    except EOFError:
        return
    with contextlib.redirect_stdout(io.StringIO()) as table:
        try:
            workspace.main()
        except Exception:
            theirs.send(("", traceback.format_exc()))
            sys.exit(1)
    theirs.send((table.getvalue(), ""))
