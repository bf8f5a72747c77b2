"""Results on stdout, everything else on stderr, including output of `model.py` and of libraries."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_LEAST_WORDS = 20
"""Columns behind an indent below which a terminal breaks lines itself."""


@contextlib.contextmanager
def results() -> Iterator[TextIO]:
    """Yield the stream for results; inside this context all other output to stdout, also of child processes,
    goes to stderr.
    """
    sys.stdout.flush()
    try:
        handle = sys.stdout.fileno()
    except (io.UnsupportedOperation, AttributeError):  # stdout is no file: a caller captures it
        captured = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield captured
        return
    with os.fdopen(os.dup(handle), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors) as stream:
        # On the level of file descriptors, so that child processes and native libraries follow.
        os.dup2(sys.stderr.fileno(), handle)
        try:
            yield stream
        finally:
            stream.flush()
            sys.stdout.flush()
            os.dup2(stream.fileno(), handle)


def emit(document: dict[str, Any] | list[Any], stream: TextIO | None = None) -> None:
    """Print one JSON document on `stream`, by default on stdout; values that JSON lacks (infinity, NaN)
    become null.
    """
    print(
        json.dumps(_finite(document), indent=1, allow_nan=False, ensure_ascii=False),
        file=stream or sys.stdout,
    )


def folded(line: str, stream: TextIO, indent: int) -> str:
    """Return `line`; for a terminal in lines of its width, broken between words, the later ones indented."""
    if not stream.isatty():
        return line
    import textwrap

    from memtune.progress import columns

    width, blanks = columns(stream), " " * indent
    if width < indent + _LEAST_WORDS:
        return line
    lines = textwrap.wrap(
        line, width, subsequent_indent=blanks, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) or line


def say(text: str) -> None:
    """Print one line for people on stderr."""
    print(text, file=sys.stderr, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and value - value != 0 else value  # inf - inf is NaN
