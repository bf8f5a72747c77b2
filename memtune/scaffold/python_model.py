"""A class or function of the user's own code as a `model.py`; inputs and loss are found on fake tensors."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import itertools
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from memtune.autotune.record import fake_errors_unlogged
from memtune.errors import UsageError, missing_file
from memtune.scaffold.draft import MARK, Draft
from memtune.workload import summary

_SIZES = (
    # part of an argument's name: value if there is no default
    (("layer", "depth", "blocks"), 4),
    (("head",), 4),
    (("vocab", "num_embeddings"), 1000),
    (("class", "label", "num_out", "out_features"), 10),
    (("channel",), 3),
    (("seq", "length", "context", "block_size"), 128),
    (("dim", "hidden", "width", "d_model", "size", "features"), 256),
)
_TARGETS = ("labels", "targets", "target", "y")
"""Names of optional arguments of `forward` that make it return the loss."""
_TAKEN = (
    *(
        "model",
        "batch",
        "size",
        "loss",
        "output",
        "targets",
        "optimizer",
        "params",
        "torch",
        "args",
        "kwargs",
    ),
    "global_batch",
)
"""Names that a file uses itself."""
_IMAGES = (224, 32, 64, 28, 256, 384, 512, 112, 96)
_LENGTHS = (128, 64, 32, 512, 1024)


@dataclass(frozen=True)
class _Target:
    """The user's class or function, and how a file imports it."""

    value: Any
    name: str
    module: str
    paths: tuple[str, ...]
    """Folders that `sys.path` needs."""

    @property
    def alias(self) -> str:
        """Name in the written file, which has functions of its own."""
        return f"build_{self.name}" if self.name in _TAKEN else self.name


@dataclass(frozen=True)
class _Input:
    """One input: the expression that makes it, with `size` samples, and the tensor for a size."""

    code: str
    shape: tuple[int, ...]
    below: int = 0
    """Exclusive limit of integers; 0 for floats."""

    def make(self, size: int) -> Tensor:
        """Return the tensor."""
        shape = (size, *self.shape)
        return torch.zeros(shape, dtype=torch.long) if self.below else torch.randn(shape)


def python_draft(target: str, out: Path) -> Draft:
    """Return the draft for `package.module:Name`, `package.module.Name`, `file.py:Name`, or a module or file.

    Args:
        target: As typed.
        out: The file to write, whose folder is on `sys.path` when it is loaded.

    Raises:
        UsageError: There is no such name, it is no model, or no input fits it.
    """
    found = _find(target, out)
    call, notes = _call(found)
    with fake_errors_unlogged(), FakeTensorMode():
        model = _build(found, call)
        inputs, labels, output = _inputs(model, found.name)
    loss, batch_more = _loss(output, inputs, labels)
    names = [each.name + "_" * (each.name in _TAKEN) for each in _required(model.forward)[: len(inputs)]] or [
        "inputs"
    ]
    lines = [
        f"{name} = {each.code}" + (f"  {MARK} shape and values")
        for name, each in zip(names, inputs, strict=True)
    ]
    lines += [f"targets = {batch_more}  {MARK} random targets"] if batch_more else []
    parts = [*names, *(["targets"] if batch_more else [])]
    unpack = f"{', '.join(parts)}{',' if len(parts) == 1 else ''} = batch"
    arguments = ", ".join([*names, *([f"{labels}=targets"] if labels else [])])
    return Draft(
        title=found.name,
        origin=target,
        imports=(
            *(("import sys", "") if found.paths else ()),
            "import torch",
            *(("", f"sys.path[:0] = {list(found.paths)!r}") if found.paths else ()),
            f"from {found.module} import {found.name}"
            + (f" as {found.alias}" if found.alias != found.name else "")
            + ("  # noqa: E402" if found.paths else ""),
        ),
        settings=notes,
        model=(f"return {call}",),
        batch=(*lines, f"return {', '.join(parts)}{',' if len(parts) == 1 else ''}"),
        loss=(unpack, f"output = model({arguments})", *loss),
    )


def _find(target: str, out: Path) -> _Target:
    """Return the class or function that `target` names, or the only model of its module."""
    file = target.partition(":")[0]
    module, name, paths = _module_of(target, out)
    for each in reversed(paths):
        if each not in sys.path:
            sys.path.insert(0, each)
    try:
        holder = _imported(module, target)
    except UsageError as error:
        # A file that runs as a script imports its neighbours by their bare names.
        folder = _folder_of(module)
        if not folder or folder in sys.path or not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        sys.path.append(folder)
        paths = (*paths, folder)
        holder = _imported(module, target)
    if not name:
        name = _only_model(holder, target, file)
    elif not hasattr(holder, name):
        found = _candidates(holder)
        near = difflib.get_close_matches(name, found, 1, 0.0)
        raise UsageError(
            f"{module} has no '{name}'.",
            evidence=f"It has: {', '.join(found)}." if found else "",
            fix=f"memtune init {file}:{near[0]}" if near else f"name a class or function of {file}",
            code="MT150",
        )
    return _Target(getattr(holder, name), name, module, paths)


def _module_of(target: str, out: Path) -> tuple[str, str, tuple[str, ...]]:
    """Return the module of `target`, the name in it, empty if it gives none, and the folders that the written
    file has to add to `sys.path`.
    """
    file, _, name = target.partition(":")
    own, here = str(out.absolute().parent), str(Path.cwd())
    if own not in sys.path:
        sys.path.insert(0, own)
    if file.endswith(".py") or "/" in file:
        path = Path(file).absolute()
        if not path.is_file():
            raise missing_file(file, "give the path of a Python file", "MT150")
        root, module = _package(path)
        folders = dict.fromkeys([str(root), str(path.parent)])
        return module, name, tuple(each for each in folders if each != own)
    # As `python -c` does, which the file does not where it lies in another folder.
    paths = () if _importable(file.partition(".")[0]) or here == own else (here,)
    sys.path[:0] = paths
    if not name and "." in file and not _importable(file):
        file, _, name = file.rpartition(".")
    return file, name, paths


def _only_model(holder: Any, target: str, file: str) -> str:
    """Return the name of the only class of module `holder` that may be the model.

    Raises:
        UsageError: There is none, or there are several.
    """
    names = _candidates(holder)
    if len(names) == 1:
        return names[0]
    # A package's own file is often empty, and the model in one of its modules.
    inside = [each.name for each in pkgutil.iter_modules(getattr(holder, "__path__", ()))]
    listed = ", ".join(names) or "no torch.nn.Module"
    where = f"{file}.{inside[0]}" if inside and not names else file
    raise UsageError(
        f"{target} has {len(names)} classes that could be the model.",
        evidence=f"Found: {listed}." + (f" Its modules: {', '.join(inside[:5])}." if inside else ""),
        fix=f"memtune init {where}:{names[-1] if names else 'Name'}",
        code="MT150",
    )


def _package(path: Path) -> tuple[Path, str]:
    """Return the folder that holds the outermost package of a file, and the file's dotted name in it."""
    names, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(names)


def _importable(module: str) -> bool:
    return bool(_folder_of(module))


def _folder_of(module: str) -> str:
    """Return the folder of a module's file, '' if there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return ""
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else ""


def _imported(module: str, target: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{target} cannot be imported: {summary(error)}",
            fix=f"make  python -c 'import {module}'  work here",
            code="MT150",
        ) from error


def _candidates(holder: ModuleType) -> list[str]:
    """Return the classes of models that a module defines and that none of its other classes contains."""
    own = {
        name: value
        for name, value in vars(holder).items()
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == holder.__name__
    }
    used: set[str] = set()
    for value in own.values():
        code = getattr(value.__init__, "__code__", None)
        nested = [each for each in code.co_consts if inspect.iscode(each)] if code else []
        used |= {
            each
            for part in ([code, *nested] if code else [])
            for each in part.co_names
            if own.get(each) is not value
        }
        used |= {base.__name__ for base in value.__bases__}
    return [name for name in own if name not in used]


def _call(found: _Target) -> tuple[str, tuple[str, ...]]:
    """Return the call that builds the model, and definitions of the arguments it needs."""
    if isinstance(found.value, nn.Module):
        raise UsageError(
            f"{found.name} is a model that exists already; every process must build its own.",
            fix="give its class, or a function that builds it",
            code="MT150",
        )
    if not callable(found.value):
        raise UsageError(
            f"{found.name} is a {type(found.value).__name__}, neither a class nor a function.",
            fix="give the class of the model, or a function that builds it",
            code="MT150",
        )
    arguments, notes = [], []
    for each in _required(found.value):
        value = _size(each)
        if value is None:
            raise UsageError(
                f"{found.name} needs {each.name}, which memtune init cannot guess.",
                evidence=f"{found.name}{inspect.signature(found.value)}",
                fix="give a function without arguments that builds the model",
                code="MT150",
            )
        constant = each.name.upper()
        notes.append(f"{constant} = {value}  {MARK} {each.name} of {found.name}")
        arguments.append(f"{each.name}={constant}")
    return f"{found.alias}({', '.join(arguments)})", tuple(notes)


def _required(function: Any) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a built-in
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        each for each in parameters if each.default is inspect.Parameter.empty and each.kind not in variable
    ]


def _size(parameter: inspect.Parameter) -> int | None:
    name = parameter.name.lower()
    return next((value for parts, value in _SIZES if any(part in name for part in parts)), None)


def _build(found: _Target, call: str) -> nn.Module:
    arguments = {each.name: _size(each) for each in _required(found.value)}
    try:
        model = found.value(**arguments)
    except Exception as error:  # the user's code may raise anything
        raise UsageError(
            f"{call} failed:  {summary(error)}",
            fix="give a function without arguments that builds the model",
            code="MT150",
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{call} returned a {type(model).__name__}, not a torch.nn.Module.",
            fix="give a class or function of a model",
            code="MT150",
        )
    return model


def _inputs(model: nn.Module, name: str) -> tuple[tuple[_Input, ...], str, Any]:
    """Return inputs that the model takes, its argument for targets or '', and its output for 2 samples."""
    needed = _required(model.forward)
    failures = []
    for inputs in itertools.islice(_guesses(model, [each.name for each in needed]), 200):
        optional = [each for each in inspect.signature(model.forward).parameters if each in _TARGETS]
        for labels in [each for each in optional if each not in {p.name for p in needed}] + [""]:
            given = [each.make(2) for each in inputs]
            more = {labels: torch.zeros_like(given[0])} if labels and inputs[0].below else {}
            if labels and not more:
                continue
            try:
                output = model(*given, **more)
                again = model(
                    *(each.make(4) for each in inputs),
                    **({labels: torch.zeros_like(inputs[0].make(4))} if more else {}),
                )
            except Exception as error:  # a guess that does not fit
                failures.append(summary(error))
                continue
            if _grows(output, again) and (not labels or _scalar(output) is not None):
                return inputs, labels, output
    raise UsageError(
        f"No input was found that {name}.forward{inspect.signature(model.forward)} takes.",
        evidence=failures[0] if failures else "",
        fix="write model.py by hand: model(), batch(size), loss(model, batch)",
        code="MT150",
    )


def _grows(output: Any, again: Any) -> bool:
    two, four = (_tensors(each) for each in (output, again))
    return bool(two) and any(
        a.dim() == 0 or a.shape[0] * 2 == b.shape[0] for a, b in zip(two, four, strict=False)
    )


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    values = (
        output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    )
    return [each for each in values if isinstance(each, Tensor)]


def _guesses(model: nn.Module, names: Sequence[str]) -> Iterator[tuple[_Input, ...]]:
    """Yield inputs for `forward`, likely ones first: by the layers that have parameters, in order."""
    layers = [
        each
        for each in model.modules()
        if next(each.children(), None) is None and next(each.parameters(), None) is not None
    ]
    tables = [each for each in layers if isinstance(each, nn.Embedding)]
    lengths = [each.num_embeddings for each in tables[1:2]] + list(_LENGTHS)
    for layer in layers[:4]:
        for first in _fitting(layer, lengths):
            yield (first, *(_companion(first, each) for each in names[1:]))


def _fitting(layer: nn.Module, lengths: Sequence[int]) -> Iterator[_Input]:
    if isinstance(layer, nn.Embedding):
        for length in lengths:
            n = layer.num_embeddings
            yield _Input(f"torch.randint({n}, (size, {length}))", (length,), n)
        yield _Input(f"torch.randint({layer.num_embeddings}, (size,))", (), layer.num_embeddings)
    elif isinstance(layer, nn.Conv2d):
        yield from (_floats(layer.in_channels, each, each) for each in _IMAGES)
    elif isinstance(layer, nn.Conv1d):
        yield from (_floats(layer.in_channels, each) for each in (1024, 16000, *_LENGTHS))
    elif isinstance(layer, nn.Conv3d):
        yield from (_floats(layer.in_channels, 16, each, each) for each in (112, 224, 32))
    elif isinstance(layer, nn.Linear):
        yield _floats(layer.in_features)
        yield from (_floats(each, layer.in_features) for each in lengths)
        yield _floats(1, int(layer.in_features**0.5), int(layer.in_features**0.5))
    elif isinstance(layer, nn.RNNBase):
        yield from (_floats(each, layer.input_size) for each in lengths)
    elif isinstance(layer, nn.LayerNorm):
        yield from (_floats(each, layer.normalized_shape[-1]) for each in lengths)


def _floats(*shape: int) -> _Input:
    return _Input(f"torch.randn(size, {', '.join(map(str, shape))})", shape)


def _companion(first: _Input, name: str) -> _Input:
    """Return a further input of `forward`: times of a diffusion model, or one like the first."""
    if any(part in name.lower() for part in ("time", "step", "sigma")) or name == "t":
        return _Input("torch.randint(1000, (size,))", (), 1000)
    return first


def _scalar(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    found = [loss] if isinstance(loss, Tensor) else [each for each in _tensors(output) if each.dim() == 0]
    return found[0] if found else None


def _loss(output: Any, inputs: tuple[_Input, ...], labels: str) -> tuple[tuple[str, ...], str]:
    """Return the body of `loss` after `output = model(…)`, and the expression of targets or ''."""
    targets = inputs[0].code if labels else ""
    if _scalar(output) is not None:
        if isinstance(output, Tensor):
            return ("return output",), targets
        if isinstance(output, dict) and "loss" in output:
            return ('return output["loss"]',), targets
        if isinstance(getattr(output, "loss", None), Tensor):
            return ("return output.loss",), targets
        index = next(i for i, each in enumerate(output) if isinstance(each, Tensor) and each.dim() == 0)
        return (f"return output[{index}]",), targets
    first = _tensors(output)[0]
    take = () if isinstance(output, Tensor) else (f"output = {_access(output)}",)
    if inputs[0].below and first.dim() == 3 and len(inputs[0].shape) == 1:
        guess = "" if first.shape[-1] == inputs[0].below else f"  {MARK} the loss"
        code = "torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())"
        return (*take, f"return {code}{guess}"), f"torch.randint({first.shape[-1]}, (size, {first.shape[1]}))"
    if first.dim() == 2 and first.shape[1] > 1:
        code = "torch.nn.functional.cross_entropy(output, targets)"
        return (
            *take,
            f"return {code}  {MARK} the loss, as for classes",
        ), f"torch.randint({first.shape[1]}, (size,))"
    return (*take, f"return output.float().square().mean()  {MARK} a placeholder for your loss"), ""


def _access(output: Any) -> str:
    if isinstance(output, dict):
        return f"output[{next(key for key, each in output.items() if isinstance(each, Tensor))!r}]"
    return f"output[{next(i for i, each in enumerate(output) if isinstance(each, Tensor))}]"
