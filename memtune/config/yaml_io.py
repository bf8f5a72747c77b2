"""YAML 1.2 as untrusted data: parsed with line numbers and without tags or aliases, written short, saved
atomically.

The data are mappings with text keys, lists, text, numbers, booleans and null, as in JSON. Scalars follow the
YAML 1.2 core schema, so `no` is text and `1e-3` a number. Parsing never recurses, so deep nesting cannot
overflow the stack.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import math
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memtune.errors import ConfigError, EnvironmentFault

MAX_BYTES = 2**20
MAX_DEPTH = 20

KeyPath = tuple[str | int, ...]
"""Keys and indices that lead to a value."""
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_CONSTANTS = {"": None, "~": None} | {
    spelt: value
    for word, value in (("null", None), ("true", True), ("false", False))
    for spelt in (word, word.capitalize(), word.upper())
}
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+*-]*( [A-Za-z0-9_./+*-]+)*")


class Document:
    """Parsed data with the line number of each part.

    Attributes:
        data: The value of the document; an empty document is an empty mapping.
        lines: Line number by path.
        source: Name for messages: a file name, or `config`.
    """

    def __init__(self, data: Any, lines: Mapping[KeyPath, int], source: str) -> None:
        self.data, self.source = data, source
        self.lines = lines

    def where(self, path: KeyPath) -> str:
        """Return `tuned.yaml:7` for the part at `path`, or for the nearest part around it with a line."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return f"{self.source}:{self.lines[path[:length]]}"
        return self.source

    def part(self, path: KeyPath) -> Document:
        """Return the part at `path` as a document of its own, with the same source and lines."""
        data, length = self.data, len(path)
        for key in path:
            data = data[key]
        lines = {at[length:]: line for at, line in self.lines.items() if at[:length] == path}
        return Document(data, lines, self.source)


class _Builder:
    """Builder of data from parser events: a stack of open containers, one step per event."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.root: Any = {}
        self.lines: dict[KeyPath, int] = {}
        self._open: list[tuple[Any, KeyPath]] = []  # containers and their paths
        self._keys: list[str | None] = []  # per container, the key whose value is next
        self._documents = 0

    def feed(self, event: Any) -> None:
        name, line = type(event).__name__, event.start_mark.line + 1
        if name == "DocumentStartEvent":
            self._documents += 1
            if self._documents > 1:
                raise self.refuse("a second document", line, "keep one document per file")
        elif name == "AliasEvent" or getattr(event, "anchor", None) is not None:
            raise self.refuse("an anchor or alias", line, "write the value out")
        elif name in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent"):
            if event.tag is not None:
                raise self.refuse(
                    f"the tag {str(event.tag)[:40]}", line, "remove it; plain values are enough"
                )
            if name == "ScalarEvent":
                self._scalar(event, line)
            else:
                self._start({} if name == "MappingStartEvent" else [], line)
        elif name in ("MappingEndEvent", "SequenceEndEvent"):
            self._open.pop()
            self._keys.pop()

    def refuse(self, what: str, line: int, fix: str) -> ConfigError:
        return ConfigError(f"{self.source}:{line}  {what} is not allowed in a config.", fix=fix, code="MT205")

    def _start(self, container: Any, line: int) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise self.refuse(f"nesting deeper than {MAX_DEPTH}", line, "flatten it")
        path = self._place(container, line)
        self._open.append((container, path))
        self._keys.append(None)

    def _scalar(self, event: Any, line: int) -> None:
        if self._open and isinstance(self._open[-1][0], dict) and self._keys[-1] is None:
            mapping, path = self._open[-1]
            if event.value in mapping:
                first = self.lines[(*path, event.value)]
                raise self.refuse(
                    f"the key '{event.value[:60]}', given on line {first} already,", line, "keep one of them"
                )
            self._keys[-1] = event.value
            return
        try:
            value = _resolve(event.value) if event.style is None else event.value
        except ValueError:
            raise self.refuse("a number of this length", line, "shorten it") from None
        self._place(value, line)

    def _place(self, value: Any, line: int) -> KeyPath:
        """Put a value into the innermost open container; return its path."""
        path: KeyPath = ()
        if not self._open:
            self.root = value
        else:
            container, outer = self._open[-1]
            if isinstance(container, list):
                path = (*outer, len(container))
                container.append(value)
            else:
                key = self._keys[-1]
                if key is None:
                    raise self.refuse("a mapping or list as a key", line, "write the key as a word")
                path = (*outer, key)
                container[key] = value
                self._keys[-1] = None
        self.lines[path] = line
        return path


def parse(text: str | bytes, source: str = "config") -> Document:
    """Parse one YAML 1.2 document of plain data.

    Raises:
        ConfigError: It is no YAML, or has tags, anchors, aliases, duplicate or non-text keys, more than one
            document, more than 1 MiB, or more than 20 levels.
    """
    # Imported here: commands that read no config do not pay for it.
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError

    raw = text.encode("utf-8", errors="surrogatepass") if isinstance(text, str) else text
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{source} is larger than {MAX_BYTES >> 20} MiB, the limit for a config.",
            fix="check that this is the file you meant",
            code="MT205",
        )
    builder = _Builder(source)
    try:
        for event in YAML(typ="safe", pure=True).parse(raw.decode("utf-8")):
            builder.feed(event)
    except ConfigError:
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(
            f"{where}  this is not YAML:  {reason}", fix="correct that line", code="MT205"
        ) from error
    # ruamel raises errors of many types on hostile text; each of them means that the text is no YAML.
    except Exception as error:
        raise ConfigError(
            f"{source} is not YAML:  {_first_line(error)}", fix="write it as UTF-8 text", code="MT205"
        ) from error
    return Document(builder.root, builder.lines, source)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]


_INT_CHARS = 40
"""No quantity of a config needs more; Python refuses to print much longer ones."""


def _resolve(text: str) -> Any:
    """Return the value of a plain scalar under the core schema."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        if len(text) > _INT_CHARS:
            raise ValueError("a number of this length")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _INFINITE.fullmatch(text):
        return -math.inf if match[1] == "-" else math.inf
    return math.nan if text in (".nan", ".NaN", ".NAN") else text


def flow(value: Any) -> str:
    """Return `value` on one line, like `{kind: copy_out, ratio: 0.5}`; parsing it returns an equal value."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(str(key))}: {flow(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and _resolve(value) is value
        return value if plain else _quoted(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not plain data")


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"


def _quoted(text: str) -> str:
    escaped = []
    for char in text:
        if char in '"\\':
            escaped.append("\\" + char)
        elif char.isprintable() and char != "\ufeff":
            escaped.append(char)
        else:
            escaped.append(f"\\U{ord(char):08x}" if ord(char) > 0xFFFF else f"\\u{ord(char):04x}")
    return '"' + "".join(escaped) + '"'


def read_text(path: Path) -> bytes:
    """Return at most `MAX_BYTES` + 1 bytes of the config file at `path`.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        if path.is_dir():
            raise ConfigError(
                f"{path} is a folder, not a config.", fix="give the path of a tuned.yaml", code="MT207"
            )
        if path.suffix == ".py" and path.is_file():
            raise ConfigError(
                f"{path} is a Python file, not a config.",
                fix=f"memtune plan {path} --out tuned.yaml  predicts one; memtune search measures",
                code="MT207",
            )
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        near = sorted(each.name for each in path.parent.glob("*.y*ml"))[:5] if path.parent.is_dir() else []
        raise ConfigError(
            f"There is no file {path}.",
            evidence=f"Here: {', '.join(near)}." if near else "",
            fix="memtune search model.py  writes tuned.yaml",
            code="MT207",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read:  {_first_line(error)}", fix="check its permissions", code="MT207"
        ) from error


def _locked_temporary(target: Path, mode: int) -> tuple[Path, int]:
    """Return a new temporary file next to `target`, and its descriptor, which holds its lock."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with contextlib.suppress(OSError):  # a file system without locks keeps what a killed writer leaves
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:  # else another writer took it for abandoned before it was locked
            return temporary, handle
        os.close(handle)


def _remove_abandoned(target: Path) -> None:
    """Remove temporary files of `target` whose writers were killed, which released their locks."""
    for each in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 8}.tmp"):
        with contextlib.suppress(OSError), each.open("rb") as file:  # locked, or removed by another writer
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            each.unlink()


def save_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` to `path` atomically: a crash at any moment leaves the old file or the new one, complete
    and on disk.

    Returns:
        The file written; a symbolic link is followed, not replaced.

    Raises:
        EnvironmentFault: The folder is missing, read-only or full; nothing is left behind.
    """
    # Under the user's umask, as an editor does, because configs are shared.
    return _save(path, text.encode("utf-8"), 0o666)


def save_private(path: str | os.PathLike[str], data: bytes) -> Path:
    """Write `data` as `save_text` does, for the user only: files of a study have output and code of users."""
    return _save(path, data, 0o600)


def _save(path: str | os.PathLike[str], data: bytes, mode: int) -> Path:
    target = Path(os.path.realpath(path))
    try:
        _remove_abandoned(target)
        temporary, handle = _locked_temporary(target, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        # The rename itself is durable only after fsync of the folder.
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written:  {error.strerror}",
            fix="free space there, or choose another file",
            code="MT403",
        ) from error
    return target
