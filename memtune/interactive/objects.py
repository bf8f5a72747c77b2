"""Objects of a notebook or script as a `model.py`, because trials run in processes of their own.

`write_workload` stores the objects with cloudpickle and writes a file that loads them. Functions and classes
of an importable module are stored by name, those of a notebook or of the running script by value.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from memtune._optional import require
from memtune.config import save_private
from memtune.errors import UsageError
from memtune.workload import OPTIONAL, REQUIRED, map_tensors, summary, tensors_of

FOLDER = Path(".memtune") / "objects"
_FUNCTIONS = (*REQUIRED, *OPTIONAL)
_FILE = '''"""{title}: the objects given to memtune, stored for processes that train with them."""

import sys

from memtune.interactive import load_functions

# After torch is imported: it tries modules that need not exist, such as `cuda`, and would find the user's.
sys.path.extend(each for each in {path} if each not in sys.path)
globals().update(load_functions({folder!r}))
'''


def workload_of(
    model: Any,
    *,
    batch: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    blocks: Callable[..., Any] | None = None,
) -> str:
    """Return `model.py` or `model.py:name` for the first argument of `memtune.search` and `memtune.plan`.

    Args:
        model: The path of a file, an imported module of one, an object or class with the functions of a
            `model.py`, a function that builds the model, or the model itself.
        batch: The function `batch(size)`, or one batch whose samples are used over and over.
        loss: The function `loss(model, batch)`.
        optimizer: The function `optimizer(params)` or `optimizer(model)`.
        blocks: The function `blocks(model)`.

    Raises:
        UsageError: Something is missing, given twice, or cannot be stored.
    """
    given = {"batch": batch, "loss": loss, "optimizer": optimizer, "blocks": blocks}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(model, str | os.PathLike | ModuleType):
        if given:
            raise UsageError(
                f"{', '.join(given)} and a file are given; the file has its own.",
                fix="pass the path alone, or the model as an object",
                code="MT105",
            )
        return _file_of(model) if isinstance(model, ModuleType) else os.fspath(model)
    is_holder = not isinstance(model, nn.Module) and all(
        callable(getattr(model, each, None)) for each in REQUIRED
    )
    if is_holder:
        holder = model() if inspect.isclass(model) else model
        own = {each: getattr(holder, each, None) for each in _FUNCTIONS}
        return write_workload(
            type(holder).__name__, {**{k: v for k, v in own.items() if v is not None}, **given}
        )
    missing = [each for each in ("batch", "loss") if each not in given]
    if missing:
        raise UsageError(
            f"{_called(model)} alone cannot be trained: {' and '.join(missing)} missing.",
            fix="memtune.search(model, batch=batch, loss=loss)  with  batch(size)  and  loss(model, batch)",
            code="MT105",
        )
    return write_workload(_called(model), {"model": model, **given})


def _file_of(module: ModuleType) -> str:
    path = getattr(module, "__file__", None)
    if path is None:
        raise UsageError(
            f"The module {module.__name__} has no file, so no other process can load it.",
            fix="pass its functions: memtune.search(model, batch=batch, loss=loss)",
            code="MT105",
        )
    return str(path)


def write_workload(title: str, functions: dict[str, Any]) -> str:
    """Store `functions` by name below `.memtune/objects`; return the path of the `model.py` that has them.

    Raises:
        UsageError: One of them cannot be used or stored; the message names it.
    """
    model, batch = functions["model"], functions["batch"]
    if isinstance(model, nn.Module):
        functions["model"] = None  # stored by itself, and loaded again at each call
        _refuse_meta(model)
    elif not callable(model):
        raise UsageError(
            f"The model is a {type(model).__name__}, neither a module nor a function that builds one.",
            fix="pass the model, or a function without arguments that returns it",
            code="MT105",
        )
    if not callable(batch):
        functions["batch"] = _samples(batch)
    for name in ("loss", "optimizer", "blocks"):
        if name in functions and not callable(functions[name]):
            what = f"{name} is a {type(functions[name]).__name__}, not a function."
            raise UsageError(what, fix=f"write  {(REQUIRED | OPTIONAL)[name][1]}", code="MT105")
    stored = {name: _stored(name, value) for name, value in functions.items()}
    folder = (FOLDER / _digest(model, functions)).absolute()
    for each in (folder.parents[1], folder.parent, folder):  # weights and code: for the user only
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    save_private(folder / "objects.pkl", pickle.dumps(stored))
    if functions["model"] is None:
        save_private(folder / "model.pt", _stored("model", model))
    name = re.sub(r"\W+", "_", title).strip("_") or "model"
    path = folder / f"{name}.py"
    above = [str(Path(each or ".").absolute()) for each in sys.path]
    save_private(path, _FILE.format(title=name, path=above, folder=str(folder)).encode())
    return str(path)


def _digest(model: Any, functions: dict[str, Any]) -> str:
    """Return a name for the objects that is the same in the next session, so that a study can be resumed."""
    # It is made of sources and weights: cloudpickle's bytes differ from call to call.
    found = hashlib.sha256()
    for name, function in functions.items():
        found.update(f"{name} {_source(type(model) if function is None else function)}".encode())
    if isinstance(model, nn.Module):
        for name, tensor in model.state_dict().items():
            found.update(name.encode())
            found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # typed into a plain prompt, or an object with __call__
        return f"{type(function).__module__}.{_called(function)}"


def _stored(name: str, value: Any) -> bytes:
    cloudpickle = require("cloudpickle")
    buffer = io.BytesIO()
    try:
        if isinstance(value, nn.Module):
            torch.save(value, buffer, pickle_module=cloudpickle)
        else:
            cloudpickle.dump(value, buffer)
    except Exception as error:  # objects may raise anything while they are pickled
        raise UsageError(
            f"{name} cannot be sent to the processes of the trials:  {summary(error)}",
            evidence="It is stored with cloudpickle, as are the variables that its code uses.",
            fix=(
                "create files, locks, connections and data loaders inside the function; or write a model.py"
                " and pass its path"
            ),
            code="MT106",
        ) from error
    return buffer.getvalue()


def _refuse_meta(model: nn.Module) -> None:
    if any(each.is_meta for each in (*model.parameters(), *model.buffers())):
        raise UsageError(
            f"The {type(model).__name__} is on the meta device: it has no weights to train.",
            fix="pass the function that builds it",
            code="MT105",
        )


@dataclass(frozen=True)
class _Samples:
    """Batches of any size from the samples of one batch."""

    batch: Any
    n: int

    def __call__(self, size: int) -> Any:
        index = torch.arange(size) % self.n
        return map_tensors(
            self.batch, lambda each: each[index] if each.dim() and len(each) == self.n else each
        )


def _samples(batch: Any) -> _Samples:
    tensors = [each for each in tensors_of(batch) if each.dim()]
    if not tensors:
        raise UsageError(
            f"batch is a {type(batch).__name__} without tensors that have a dimension for samples.",
            fix="pass one batch, as your loss takes it, or a function batch(size)",
            code="MT105",
        )
    return _Samples(map_tensors(batch, lambda each: each.detach().cpu()), len(tensors[0]))


def load_functions(folder: str) -> dict[str, Callable[..., Any]]:
    """Return the functions by name that `write_workload` stored in `folder`; this runs the user's code."""
    stored = pickle.loads(Path(folder, "objects.pkl").read_bytes())
    functions = {name: pickle.loads(data) for name, data in stored.items()}
    if functions["model"] is None:
        weights = Path(folder, "model.pt")
        functions["model"] = lambda: torch.load(weights, map_location="cpu", weights_only=False)
    return functions


def _called(model: Any) -> str:
    return str(getattr(model, "__name__", type(model).__name__))
