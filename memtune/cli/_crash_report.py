"""Message for the user when the process of a command crashes; it runs the code of `model.py`, which may load
any native library.

The interpreter's fault handler writes its traceback into a pipe. A small process at the other end, started
from this file, prints the message after the crash. The exit code is that of the signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

_SCREEN_OFF = "\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1049l\x1b[?25h"
"""Escape codes that restore the terminal after the search screen: mouse off, main screen, visible cursor."""


@contextlib.contextmanager
def report_crashes(model: str, as_json: bool) -> Iterator[None]:
    """Report a fatal signal inside this context on stderr, and with `as_json` as a document on stdout.

    Args:
        model: The user's file, as given on the command line.
        as_json: Whether stdout is for a program.
    """
    if faulthandler.is_enabled():  # the user asked for the interpreter's own traceback
        yield
        return
    command = [sys.executable, "-I", "-S", __file__, Path(model).name.partition(":")[0], str(int(as_json))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as reporter:
        assert reporter.stdin is not None
        faulthandler.enable(reporter.stdin, all_threads=False)
        try:
            yield
        finally:
            faulthandler.disable()


def message(trace: str, file: str) -> dict[str, str] | None:
    """Return the error described by the fault handler's `trace`, or None if there was no fault."""
    fault = re.search(r"Fatal Python error: (.+)", trace)
    if fault is None:
        return None
    frame = re.search(rf'File "([^"]*/)?{re.escape(file)}", line (\d+) in (\S+)', trace)
    if frame is None:
        innermost = re.search(r"File .*", trace)
        what = f"the process of memtune crashed:  {fault[1]}."
        return _error("MT900", what, innermost[0] if innermost else "", "please report it with the command")
    what = f"{file} crashed the process in {frame[3]}(), line {frame[2]}:  {fault[1]}."
    fix = (
        f"call {frame[3]}() in a separate Python process to reproduce it; the usual cause is a native library"
        " that it loads"
    )
    return _error("MT113", what, "", fix)


def _error(code: str, what: str, evidence: str, fix: str) -> dict[str, str]:
    return {"code": code, "what": what, "evidence": evidence, "fix": fix}


def _report(file: str, as_json: bool) -> None:
    """Wait for the end of the parent process, and print a message if it crashed."""
    # Read now, before the search screen switches the terminal to raw mode.
    terminal = termios.tcgetattr(2) if os.isatty(2) else None
    error = message(sys.stdin.read(), file)  # returns when the parent ends and its end of the pipe closes
    if error is None:
        return
    if terminal is not None:
        termios.tcsetattr(2, termios.TCSANOW, terminal)
        sys.stderr.write(_SCREEN_OFF)
    if as_json:
        print(json.dumps({"schema": 1, "error": error}))
    lines = [f"{error['code']} {error['what']}", error["evidence"], f"Fix: {error['fix']}"]
    print("\n      ".join(line for line in lines if line), file=sys.stderr)


if __name__ == "__main__":
    _report(sys.argv[1], sys.argv[2] == "1")
