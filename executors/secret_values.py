"""Secrets of the environment, masked in the output of trials that is stored and shown."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from memtune.config import save_private
from memtune.errors import EnvironmentFault

_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"://[^/\s]*:[^/\s]*@")
_LEAST_CHARS = 8
"""A shorter value, such as `token`, may be an ordinary word of the output."""


def masked(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return `text` with `<NAME>` for the value of each variable that holds a secret by its name or form."""
    secrets = [(value, name) for name, value in environ.items() if _is_secret(name, value)]
    for value, name in sorted(secrets, key=lambda each: -len(each[0])):  # one may contain another
        text = text.replace(value, f"<{name}>")
    return text


def mask_file(path: Path) -> None:
    """Replace the secrets in a log as `masked` does, atomically; a log without any is not written."""
    with contextlib.suppress(OSError, EnvironmentFault):
        text = path.read_bytes().decode(errors="surrogateescape")
        if (shown := masked(text)) != text:
            save_private(path, shown.encode(errors="surrogateescape"))


def _is_secret(name: str, value: str) -> bool:
    # `SSH_AUTH_SOCK` and the like name a file, which is no secret and often part of a message.
    is_path = value.startswith("/")
    has_name = _NAME.search(name) is not None and not is_path
    return len(value) >= _LEAST_CHARS and (has_name or _URL_PASSWORD.search(value) is not None)
