"""The `memtune` command: parse arguments, run a command, and turn errors into messages and exit codes."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memtune.errors import MemtuneError

__all__ = ["main", "run"]


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit with its documented code: 0, 1, 2, 3, 4, 130 or 143."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without `·` shows `?`
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: list[str]) -> int:
    """Run one command and return its exit code; no exception leaves it."""
    import typer

    from memtune.cli._app import app
    from memtune.errors import MemtuneError

    # Arguments after `--` belong to the command that `memtune run` starts.
    own = argv[: argv.index("--")] if "--" in argv else argv
    as_json = "--json" in own
    try:
        try:
            code = app(argv, standalone_mode=False, prog_name="memtune", obj=argv)
            return code if isinstance(code, int) else 0
        except typer.Abort:
            return 130
        except typer.TyperException as error:
            return _usage(error, as_json, _help_of(error))
    except MemtuneError as error:
        if own and own[0] in ("-v", "--verbose"):
            traceback.print_exc()
        _print_error(error, as_json)
        return error.exit_code
    except KeyboardInterrupt:
        _print_error(MemtuneError("interrupted.", code="MT130"), as_json)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) closed the pipe. Without this, the flush of stdout at exit would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # a bug of memtune: keep the evidence, spare the user the traceback
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _full(error)
        return _bug(as_json)


def _help_of(error: object) -> str:
    """Return the help command for a usage error: that of the mistyped command, or memtune's own."""
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context is not None else 'memtune'} --help"


def _usage(error: object, as_json: bool, fix: str) -> int:
    from memtune.errors import UsageError

    message = (error.format_message() if hasattr(error, "format_message") else str(error)).replace("?.", "?")
    if message:  # empty for a group without a command, which has already printed its help
        _print_error(
            UsageError(message if message.endswith(("?", ".")) else f"{message}.", fix=fix, code="MT100"),
            as_json,
        )
    return 2


def _print_error(error: MemtuneError, as_json: bool) -> None:
    if as_json:
        body = {"code": error.code, "what": error.what, "evidence": error.evidence, "fix": error.fix}
        print(json.dumps({"schema": 1, "error": body}))
    from memtune.cli._output import folded

    for line in str(error).splitlines():
        # A fix is often a command, which is copied as one line.
        print(line if line.startswith("      Fix:") else folded(line, sys.stderr, 6), file=sys.stderr)


def _full(error: OSError) -> int:
    """Report a full disk, which may be that of a redirected stdout: nothing further is written there."""
    from memtune.errors import EnvironmentFault

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    fault = EnvironmentFault("a disk is full.", evidence=f"{error}.", fix="free space there", code="MT402")
    _print_error(fault, as_json=False)
    return fault.exit_code


def _bug(as_json: bool) -> int:
    from memtune.errors import MemtuneError

    trace = traceback.format_exc()
    path = _cache_folder() / f"traceback-{int(time.time())}-{os.getpid()}.txt"
    evidence = f"The traceback is in {path}."
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(trace)
    except OSError as error:
        evidence = f"The traceback could not be kept ({error}):\n{trace}"
    what = f"a bug in memtune: {trace.strip().splitlines()[-1][:200]}"
    _print_error(
        MemtuneError(what, evidence=evidence, fix="please report it with that file", code="MT900"), as_json
    )
    return 4


def _cache_folder() -> Path:
    try:
        from memtune.memory import cache_dir
    except Exception:  # cache_dir imports torch, and a broken torch may be the bug to report
        import tempfile

        return Path(tempfile.gettempdir())
    return cache_dir()
