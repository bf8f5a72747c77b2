"""Results on stdout, everything else on stderr: what `model.py` or a library prints must not end up among the
results.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


@contextlib.contextmanager
def results() -> Iterator[TextIO]:
    """Yield the stream for results; while inside, everything else written to stdout, by child processes too,
    goes to stderr.
    """
    sys.stdout.flush()
    try:
        handle = sys.stdout.fileno()
    except (io.UnsupportedOperation, AttributeError):  # stdout is no file: it is captured by whoever called
        captured = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield captured
        return
    with os.fdopen(os.dup(handle), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors) as stream:
        os.dup2(sys.stderr.fileno(), handle)
        try:
            yield stream
        finally:
            stream.flush()
            sys.stdout.flush()
            os.dup2(stream.fileno(), handle)


def emit(document: dict[str, Any] | list[Any], stream: TextIO | None = None) -> None:
    """One JSON document, on stdout or on the stream that `results` gave. What JSON cannot say (infinity)
    becomes null.
    """
    print(
        json.dumps(_finite(document), indent=1, allow_nan=False, ensure_ascii=False),
        file=stream or sys.stdout,
    )


def say(text: str) -> None:
    """One line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and value - value != 0 else value
