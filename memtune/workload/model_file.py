"""The user's `model.py` as a file: import, checks and quotes in messages. Uses the standard library only."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import operator
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from memtune.errors import WorkloadError

REQUIRED: dict[str, tuple[int, str]] = {
    # name: (number of positional arguments that memtune passes, the line to add if it is missing)
    "model": (0, "def model(): return YourModel()"),
    "batch": (1, "def batch(size): return inputs, targets   # `size` samples, on the CPU"),
    "loss": (2, "def loss(model, batch): ...   # returns a scalar tensor"),
}
OPTIONAL: dict[str, tuple[int, str]] = {
    "optimizer": (1, "def optimizer(params): return torch.optim.AdamW(params)"),  # or of `model`, by name
    "blocks": (1, "def blocks(model): return list(model.layers)"),
    "worst_batch": (1, "def worst_batch(size): ...   # the largest batch of `size` samples, on the CPU"),
    "buckets": (
        1,
        "def buckets(size): return [...]   # a batch of `size` samples per length bucket, on the CPU",
    ),
}
OPENED_AS = "memtune_user_"
"""Prefix of the names of these files in `sys.modules`."""
_serial = itertools.count()
_MOST_NAMES = 5


@dataclass(frozen=True)
class UserFile:
    """An imported and checked `model.py`.

    `holder` is the module, or the object selected by `model.py:name`; its functions are attributes.
    """

    path: Path
    name: str | None
    source_sha256: str
    holder: Any
    global_batch: int | None
    zero_grad_to_none: bool = True

    def function(self, name: str) -> Callable[..., Any] | None:
        """Return the user's function `name`; None if an optional one is absent."""
        found: Callable[..., Any] | None = getattr(self.holder, name, None)
        return found


def load_user_file(target: str | Path) -> UserFile:
    """Import `model.py` or `model.py:name` and check that its functions exist. This runs the user's code.

    Raises:
        WorkloadError: The file is missing, does not parse, fails or exits on import, or lacks a function.
    """
    # The module gets a unique name, so `__name__ == "__main__"` is false, and no bytecode is written.
    # Its directory stays on `sys.path`, because functions may import neighbouring files when they are
    # called; if that is a package, so does the folder that holds it, for relative imports.
    path, name = split_target(target)
    source = _read(path)
    module = _import(path, _compiled(path, source))
    holder = module if name is None else _pick(module, path, name)
    for function, (n_args, example) in REQUIRED.items():
        _check_function(holder, path, name, function, n_args, example, required=True)
    for function, (n_args, example) in OPTIONAL.items():
        _check_function(holder, path, name, function, n_args, example, required=False)
    return UserFile(
        path,
        name,
        hashlib.sha256(source).hexdigest(),
        holder,
        _global_batch(holder, path),
        _to_none(holder, path),
    )


def check_source(target: str | Path) -> None:
    """Check that `model.py` or `model.py:name` is a file that parses, without running it.

    Raises:
        WorkloadError: It is missing, no Python file, or does not parse.
    """
    path, _ = split_target(target)
    _compiled(path, _read(path))


def split_target(target: str | Path) -> tuple[Path, str | None]:
    """Split `dir/model.py:name` into absolute path and name (or None); an existing file with a colon wins."""
    text = str(target)
    stem, colon, name = text.rpartition(":")
    if colon and not Path(text).exists() and "/" not in name:
        return Path(stem).absolute(), name
    return Path(text).absolute(), None


def user_line(error: BaseException, path: Path) -> tuple[int, str] | None:
    """Return line number and text of the innermost frame of `error` in the user's file, if there is one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return (frames[-1].lineno or 0, (frames[-1].line or "").strip()) if frames else None


_NO_DEVICE = re.compile(
    r"not compiled with \w+ enabled|not linked with support for \w+ devices"
    r"|[Nn]o [A-Z]\w+ (driver|GPUs|devices)\b"
)
"""In torch's errors on a machine without an accelerator."""


def raised_in_user_code(
    error: BaseException, path: Path, function: str, *, fix: str, code: str
) -> WorkloadError:
    """Return the error for an exception in the user's `function`, with file, line and exception."""
    found = user_line(error, path)
    where = f" at line {found[0]}" if found else ""
    evidence = f"line {found[0]}:  {found[1]}" if found and found[1] else ""
    if _NO_DEVICE.search(str(error)):
        fix = (
            "leave out .cuda() and device='cuda', or those of another device: memtune moves the model and"
            " each batch to the device; new tensors take  device=x.device"
        )
    elif isinstance(error, NotImplementedError) and "CPU" in str(error):
        fix = (
            "use an op that also runs on the CPU, where the step is recorded"
            " (torch.nn.functional.scaled_dot_product_attention for flex_attention)"
        )
    if function == "import":
        what = f"{path.name} failed at import{where.replace(' at', ',')}:  {summary(error)}"
    else:
        what = f"{function} in {path.name} failed{where}:  {summary(error)}"
    return WorkloadError(what, evidence=evidence, fix=fix, code=code)


def summary(error: BaseException, limit: int = 300) -> str:
    """Return `error` as one line: its class and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:limit] if lines else type(error).__name__


def found_in(holder: Any) -> str:
    """Return the definitions in a module or object, as a list for messages: `class GPT, train(), config`."""
    own_name = getattr(holder, "__name__", "")
    words = []
    for name in vars(holder) if isinstance(holder, ModuleType | type) else dir(holder):
        value = getattr(holder, name, None)
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        if isinstance(holder, ModuleType) and getattr(value, "__module__", own_name) not in (own_name, None):
            if inspect.isclass(value) or inspect.isroutine(value):
                continue  # imported, not defined here
        words.append(
            f"class {name}" if inspect.isclass(value) else f"{name}()" if inspect.isroutine(value) else name
        )
    listed = words[:12] + ([f"and {len(words) - 12} more"] if len(words) > 12 else [])
    return ", ".join(listed) or "nothing"


def _read(path: Path) -> bytes:
    """Return the bytes of a model file; raise with the nearest names if there is none."""
    if not path.exists():
        there = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, sorted(there), _MOST_NAMES, 0.0)
        raise WorkloadError(
            f"There is no file {_shown(path)}.",
            evidence=f"Here: {', '.join(near)}." if near else f"{path.parent} has no Python file.",
            fix="give the path of your model.py, or write one: memtune init TARGET",
            code="MT110",
        )
    if path.suffix != ".py" or not path.is_file():
        kind = (
            "a directory" if path.is_dir() else f"a '{path.suffix}' file" if path.suffix else "no Python file"
        )
        raise WorkloadError(
            f"{_shown(path)} is {kind}, not a model.py.",
            fix="give a .py file that holds model(), batch(size) and loss(model, batch)",
            code="MT110",
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise WorkloadError(
            f"{path} cannot be read:  {summary(error)}", fix=f"chmod u+r {path}", code="MT110"
        ) from error


def _shown(path: Path) -> str:
    """Return the path as it is from the working directory, if it is below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _compiled(path: Path, source: bytes) -> CodeType:
    try:
        return compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        text = (getattr(error, "text", None) or "").strip()
        raise WorkloadError(
            f"{path.name} does not parse{f', line {line}' if line else ''}: "
            f" {getattr(error, 'msg', None) or error}",
            evidence=f"line {line}:  {text}" if text else "",
            fix=(
                f"correct {path.name}{f' at line {line}' if line else ''}; python {path} shows the same error"
            ),
            code="MT102",
        ) from error


def _import(path: Path, code: CodeType) -> ModuleType:
    if _shadows_the_standard_library(path.parent):
        # Torch must import Python's `random` before the user's folder is on sys.path. Its optimizers import
        # _dynamo, and with it such modules, only when the first one is constructed.
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._dynamo")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    package = _package_of(path)
    # In a package `from . import layers` needs the package's name in the module's, and the folder above it.
    module_name = f"{package and f'{package}.'}{OPENED_AS}{path.stem}_{next(_serial)}"
    if package and (root := str(path.parents[package.count(".") + 1])) not in sys.path:
        sys.path.append(root)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look up modules by name
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise _import_error(error, path) from error
    return module


def _package_of(path: Path) -> str:
    """Return the dotted name of the package that a file is in, '' if its folder is none."""
    names: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier() and folder != folder.parent:
        names.insert(0, folder.name)
        folder = folder.parent
    return ".".join(names)


def _shadows_the_standard_library(folder: Path) -> bool:
    """Return whether a module or package in `folder` has the name of a standard library module."""
    names = {each.stem for each in folder.glob("*.py")} | {
        each.parent.name for each in folder.glob("*/__init__.py")
    }
    return not names.isdisjoint(sys.stdlib_module_names)


def _import_error(error: BaseException, path: Path) -> WorkloadError:
    if isinstance(error, SystemExit):
        found = user_line(error, path)
        return WorkloadError(
            f"{path.name} ended the process on import, line {found[0] if found else '?'}:  exit status"
            f" {error.code}",
            evidence=f"line {found[0]}:  {found[1]}" if found else "",
            fix='move what runs and exits under  if __name__ == "__main__":',
            code="MT112",
        )
    if isinstance(error, ModuleNotFoundError) and error.name:
        fix = (
            f"install '{error.name.partition('.')[0]}' into the environment of {sys.executable}, or put it"
            f" next to {path.name}"
        )
    elif isinstance(error, ImportError):
        fix = "check that the installed version has this name"
    else:
        fix = 'correct that line, or move what should not run on import under  if __name__ == "__main__":'
    return raised_in_user_code(error, path, "import", fix=fix, code="MT102")


def _pick(module: ModuleType, path: Path, name: str) -> Any:
    """Return the object `name` of a module; of a class an instance."""
    if not hasattr(module, name):
        raise WorkloadError(
            f"{path.name} defines no '{name}'.",
            evidence=f"Found: {found_in(module)}.",
            fix=f"pass {path.name} or {path.name}:<one of these>",
            code="MT111",
        )
    holder = getattr(module, name)
    if not inspect.isclass(holder):
        return holder
    try:
        return holder()
    except Exception as error:
        fix = f"give {name} a constructor without arguments, or pass {path.name}:<an instance>"
        raise raised_in_user_code(error, path, f"{name}()", fix=fix, code="MT111") from error


def _check_function(
    holder: Any, path: Path, name: str | None, function: str, n_args: int, example: str, *, required: bool
) -> None:
    value = getattr(holder, function, None)
    where = path.name if name is None else f"{path.name}:{name}"
    if value is None:
        if not required:
            return
        missing = [f"{known}()" for known in REQUIRED if getattr(holder, known, None) is None]
        raise WorkloadError(
            f"{where} defines no {missing[0]}.",
            evidence=(
                f"Looked for: model(), batch(size), loss(model, batch). Missing: {', '.join(missing)}. "
                f"Found: {found_in(holder)}."
            ),
            fix=f"add  {example}",
            code="MT101",
        )
    torch = sys.modules.get("torch")
    # Modules are callable, but `model = MyNet()` is not the function that memtune needs.
    is_instance = torch is not None and isinstance(value, torch.nn.Module)
    if not callable(value) or is_instance:
        raise WorkloadError(
            f"`{function}` in {where} is a {type(value).__name__}, not a function.",
            fix=f"write  {example}",
            code="MT101",
        )
    try:
        inspect.signature(value).bind(*range(n_args))
    except TypeError as error:
        raise WorkloadError(
            f"{function}() in {where} cannot be called with {n_args} argument{'s' * (n_args != 1)}:  {error}",
            evidence=f"Found: {function}{inspect.signature(value)}",
            fix=f"write  {example}",
            code="MT101",
        ) from error
    except ValueError:
        return  # a built-in without a signature; a wrong one fails when it is called


def _to_none(holder: Any, path: Path) -> bool:
    value = getattr(holder, "zero_grad_to_none", True)
    if not isinstance(value, bool):
        raise WorkloadError(
            f"zero_grad_to_none in {path.name} is {value!r}, neither True nor False.",
            fix="write  zero_grad_to_none = False   # if the training loop zeroes gradients in place",
            code="MT121",
        )
    return value


def _global_batch(holder: Any, path: Path) -> int | None:
    value = getattr(holder, "global_batch", None)
    if value is None:
        return None
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < 1:
        raise WorkloadError(
            f"global_batch in {path.name} is {value!r}, not a positive whole number.",
            fix="write  global_batch = 32   # samples per optimizer step over all ranks",
            code="MT121",
        )
    return number
