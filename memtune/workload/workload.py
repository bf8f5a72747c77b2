"""The workload: the user's `model.py`, with checked calls whose errors point into the user's file."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.utils._python_dispatch import _disable_current_modes

from memtune._replaced import replaced
from memtune.device import is_out_of_memory
from memtune.errors import MemtuneError, WorkloadError
from memtune.random_seeds import preserved_random, seed_all
from memtune.workload.batches import batch_size_of, map_tensors, shapes_of, split_batch, tensors_of, to_device
from memtune.workload.model_file import OPENED_AS, UserFile, load_user_file, raised_in_user_code
from memtune.workload.repeated_blocks import find_blocks

__all__ = ["Workload", "batch_size_of", "map_tensors", "shapes_of", "split_batch", "tensors_of", "to_device"]

# Errors of the machine or of other ranks are not errors of model.py; they reach the trial unchanged.
_NOT_THE_USERS: tuple[type[BaseException], ...] = (MemtuneError, MemoryError, torch.OutOfMemoryError)
if torch.distributed.is_available():
    _NOT_THE_USERS += (torch.distributed.DistError,)


_COMPARED, DRAWS = 16, 32
"""Batches whose shapes are compared, and batches drawn for the largest one if they differ."""
_DRAWS_SEED = 0


@dataclass(frozen=True)
class DrawnBatches:
    """The smallest and the largest of `DRAWS` batches, whose sizes vary."""

    smallest: Any
    largest: Any
    least_bytes: int
    most_bytes: int


@dataclass(frozen=True)
class Workload:
    """The functions of the user's `model.py`, each behind a check of its return value.

    An exception in the user's code becomes a WorkloadError with the user's line and the original as its
    cause, except out-of-memory and distributed errors, which pass through.

    Attributes:
        path: Absolute path of the file.
        name: Object in the file that has the functions (`model.py:name`), or None for the module itself.
        source_sha256: SHA-256 of the file's bytes.
        global_batch: Samples per optimizer step over all ranks; None if the file does not set it.
        zero_grad_to_none: Whether a step frees gradients at its end; otherwise it zeroes them in place, as
            `optimizer.zero_grad(set_to_none=False)` does, and later backwards add to them.
    """

    path: Path
    name: str | None
    source_sha256: str
    global_batch: int | None
    _file: UserFile = field(repr=False, compare=False)
    _found: list[bool] = field(default_factory=list, repr=False, compare=False)
    """True if batches vary in size; empty until it is known."""
    zero_grad_to_none: bool = True
    autocast_cache: bool = True
    """False: `loss` runs as under `execution: {autocast_cache: false}`."""
    bucket: int | None = None
    """The length bucket whose batches `make_batch` returns; None: those of `batch(size)`."""

    @classmethod
    def load(cls, target: str | Path) -> Workload:
        """Import `model.py` or `model.py:name` and check that its functions exist; runs the user's code.

        Raises:
            WorkloadError: The file is missing, does not parse, fails or exits on import, or lacks a function.
        """
        with _requested_autocast():
            file = load_user_file(target)
        return cls.of(file)

    @classmethod
    def of(cls, file: UserFile) -> Workload:
        """Return the workload of an imported file."""
        return cls(
            file.path,
            file.name,
            file.source_sha256,
            file.global_batch,
            file,
            zero_grad_to_none=file.zero_grad_to_none,
        )

    def build_model(self) -> nn.Module:
        """Call `model()` under the active modes and default device; return the module.

        Raises:
            WorkloadError: It raised, returned no module, or one without trainable parameters.
        """
        model = self._call(
            "model", fix="make  model()  run by itself: it takes no arguments and needs no data"
        )
        if not isinstance(model, nn.Module):
            raise self._error(
                f"model() returned {_described(model)}, not a torch.nn.Module.",
                fix="return the module itself"
                + (", without the optimizer" if isinstance(model, tuple) else ""),
                code="MT115",
            )
        if isinstance(model, torch.jit.ScriptModule):
            raise self._error(
                "model() returned a torch.jit module, whose layers cannot be observed.",
                fix="return the module itself, before torch.jit.script",
                code="MT115",
            )
        params = list(model.parameters())
        if not any(param.requires_grad for param in params):
            evidence = f"{type(model).__name__} has {len(params)} parameters" + (
                ", all frozen." if params else "."
            )
            fix = (
                "set requires_grad=True on what should be trained"
                if params
                else "assign layers to self in __init__"
            )
            raise self._error(
                "model() returned a module with nothing to train.", evidence=evidence, fix=fix, code="MT115"
            )
        return model

    def make_batch(self, size: int) -> Any:
        """Call `batch(size)`, with real tensors on the CPU even under a fake or device mode.

        Raises:
            WorkloadError: It raised, returned no tensor, or no dimension of its tensors is a multiple of
                `size`.
        """
        if self.bucket is not None:
            return self.make_buckets(size)[self.bucket]
        return self._checked_batch(self._real("batch", size), "batch", size)

    @property
    def has_worst_batch(self) -> bool:
        """Return whether the user declares the largest batch, by itself or as the largest bucket."""
        return self.bucket is None and (
            self._file.function("worst_batch") is not None or self._file.function("buckets") is not None
        )

    def make_worst_batch(self, size: int) -> Any:
        """Return the user's largest batch of `size` samples.

        Raises:
            WorkloadError: As `make_batch`.
        """
        if self._file.function("worst_batch") is None:
            return self.make_buckets(size)[-1]
        return self._checked_batch(self._real("worst_batch", size), "worst_batch", size)

    def make_buckets(self, size: int) -> list[Any]:
        """Return the user's batches of `size` samples, one per length bucket, in the order of their bytes;
        none if there are no buckets.

        Raises:
            WorkloadError: It returned no list of batches; or as `make_batch`.
        """
        if self._file.function("buckets") is None:
            return []
        batches = self._real("buckets", size)
        if not isinstance(batches, list | tuple) or not batches:
            raise self._error(
                f"buckets({size}) returned {_described(batches)}, not a list of batches.",
                fix="return one per length, as in  return [batch_of(size, length) for length in LENGTHS]",
                code="MT116",
            )
        checked = [self._checked_batch(each, "buckets", size) for each in batches]
        return sorted(checked, key=_bytes_of)

    def of_bucket(self, index: int) -> Workload:
        """Return the workload whose batches are those of one length bucket."""
        return replace(self, bucket=index, _found=[False])

    def _real(self, name: str, size: int) -> Any:
        """Return `name(size)`, with real tensors on the CPU."""
        with _disable_current_modes(), torch.device("cpu"):
            return self._call(name, size, fix=f"make  {name}({size})  run by itself", code="MT116")

    def _checked_batch(self, batch: Any, name: str, size: int) -> Any:
        """Return `batch`, a result of `name(size)`, if it has `size` samples."""
        shapes = shapes_of(batch)
        if not shapes:
            raise self._error(
                f"{name}({size}) returned {_described(batch)}, with no tensor in it.",
                fix="return tensors, alone or in a tuple, dict or dataclass",
                code="MT116",
            )
        # Not equal to `size`: a batch may be flattened to (samples × tokens,).
        if not any(dim and dim % size == 0 for shape in shapes for dim in shape):
            raise self._ignores_size(f"{name}({size}) has shapes {_listed(shapes)}")
        return batch

    def drawn_batches(self, size: int) -> DrawnBatches | None:
        """Return the extremes of `DRAWS` batches if these vary in size (graphs, packed sequences) and the
        user declares no largest one, else None. Preserves all random states, from which it does not draw.

        Raises:
            WorkloadError: As `make_batch`.
        """
        if self.has_worst_batch or not self._varies():
            return None
        with preserved_random():
            seed_all(_DRAWS_SEED)
            smallest = largest = self.make_batch(size)
            least = most = _bytes_of(largest)
            for _ in range(DRAWS - 1):
                batch = self.make_batch(size)
                if (drawn := _bytes_of(batch)) > most:
                    largest, most = batch, drawn
                elif drawn < least:
                    smallest, least = batch, drawn
        return DrawnBatches(smallest, largest, least, most)

    def largest_batch(self, size: int) -> Any | None:
        """Return the user's largest batch, else the largest drawn one; None if all are of one size.

        Raises:
            WorkloadError: As `make_batch`.
        """
        if self.has_worst_batch:
            return self.make_worst_batch(size)
        drawn = self.drawn_batches(size)
        return None if drawn is None else drawn.largest

    def _varies(self) -> bool:
        """Return whether batches of as many samples differ in shape; preserves all random states."""
        if not self._found:
            with preserved_random():
                seed_all(_DRAWS_SEED)
                drawn = [shapes_of(self.make_batch(2)) for _ in range(_COMPARED)]
            self._found.append(any(each != drawn[0] for each in drawn))
        return self._found[0]

    def check_batch(self) -> None:
        """Require that a batch of 4 samples is larger than one of 2; preserves all random states.

        Raises:
            WorkloadError: A batch raised or ignores its size.
        """
        with preserved_random():
            two, four = shapes_of(self.make_batch(2)), shapes_of(self.make_batch(4))
        if two == four:
            raise self._ignores_size(f"batch(2) and batch(4) both have shapes {_listed(two)}")

    def tokens_per_sample(self) -> int | None:
        """Return the tokens of a sample: the length of the first integer tensor of shape (samples, tokens) in
        a batch; None if there is none, or features too. Preserves all random states.
        """
        with preserved_random():
            batch = self.make_batch(2)
        kinds = (torch.int64, torch.int32)
        sizes = (each.shape for each in tensors_of(batch) if each.dtype in kinds)
        # Class indices have the shape (samples,) or (samples, 1).
        found = next((each for each in sizes if len(each) == 2 and each[0] == 2 and each[1] > 1), None)
        # Next to features, integers are categories or captions; floats of their shape are masks and weights.
        features = any(each.is_floating_point() and each.shape != found for each in tensors_of(batch))
        return None if found is None or features else found[1]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Call `loss(model, batch)`; return a floating-point scalar that requires grad (in grad mode).

        Raises:
            WorkloadError: It raised, or returned anything else.
        """
        with contextlib.nullcontext() if self.autocast_cache else autocast_cache(False):
            loss = self._call(
                "loss", model, batch, fix="make model, batch and loss agree at that line", code="MT118"
            )
        if not isinstance(loss, Tensor):
            raise self._error(
                f"loss() returned {_described(loss)}, not a scalar tensor.",
                fix=(
                    "return outputs.loss"
                    if hasattr(loss, "loss")
                    else "return the loss itself, without .item() or a tuple"
                ),
                code="MT119",
            )
        if loss.numel() != 1:
            raise self._error(
                f"loss() returned a tensor of shape {tuple(loss.shape)}, not a scalar.",
                fix="return loss.mean()",
                code="MT119",
            )
        if not loss.is_floating_point():
            raise self._error(
                f"loss() returned a tensor of {loss.dtype}, not of floating point.",
                fix="compute the loss in float32",
                code="MT119",
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise self._error(
                "loss() returned a tensor without gradient: backward would reach no parameter.",
                evidence=(
                    "Usual causes: torch.no_grad(), .detach(), .item(), or a new tensor built from numbers."
                ),
                fix="compute the loss from the model's output",
                code="MT119",
            )
        return loss

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Call the user's `optimizer(params)` with the trained parameters, or `optimizer(model)` if its
        parameter is named so; without one, return torch's AdamW with its defaults.

        Raises:
            WorkloadError: It raised, returned no optimizer, or one that has none of the parameters.
        """
        optimizer = self._checked_optimizer(model)
        # The step is recorded as the user's loop runs it: gradients zeroed in place are never freed.
        if not self.zero_grad_to_none:
            optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
        return optimizer

    def _checked_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        given = [each for each in model.parameters() if each.requires_grad]
        function = self._file.function("optimizer")
        if function is None:
            return torch.optim.AdamW(given)
        # Groups by name (no weight decay for norms and biases) need the model.
        takes_model = _first_parameter(function) == "model"
        argument = "model" if takes_model else "list(model.parameters())"
        optimizer = self._call(
            "optimizer",
            model if takes_model else given,
            fix=f"make  optimizer({argument})  run by itself",
            code="MT120",
        )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self._error(
                f"optimizer() returned {_described(optimizer)}, not a torch.optim.Optimizer.",
                fix="return torch.optim.AdamW(params)",
                code="MT120",
            )
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if not any(id(param) in held for param in given):
            raise self._error(
                "optimizer() holds none of the parameters it was given.",
                fix="return torch.optim.AdamW(params)",
                code="MT120",
            )
        needed = [
            each
            for each in inspect.signature(optimizer.step).parameters.values()
            if each.default is each.empty
        ]
        if any(each.kind is each.POSITIONAL_OR_KEYWORD for each in needed):
            raise self._error(
                f"{type(optimizer).__name__}.step needs {', '.join(each.name for each in needed)}: it runs"
                " forward and backward several times in a step, and memtune plans steps of one.",
                fix="return an optimizer whose step() needs nothing, like torch.optim.AdamW(params)",
                code="MT120",
            )
        return optimizer

    def find_blocks(self, model: nn.Module) -> list[str]:
        """Return the qualified names of the repeated blocks: the user's `blocks(model)`, else those found.

        Raises:
            WorkloadError: `blocks` raised, or returned anything but submodules of `model`.
        """
        if self._file.function("blocks") is None:
            return find_blocks(model)
        blocks = self._call("blocks", model, fix="make  blocks(model())  run by itself", code="MT122")
        fix = "return a list of submodules, as in  return list(model.layers)"
        if not isinstance(blocks, list | tuple | nn.ModuleList | nn.Sequential):
            raise self._error(
                f"blocks() returned {_described(blocks)}, not a list of modules.", fix=fix, code="MT122"
            )
        names = {id(module): name for name, module in model.named_modules() if name}
        for i, block in enumerate(blocks):
            if id(block) not in names:
                raise self._error(
                    f"blocks() returned, as item {i}, {_described(block)}, which is no submodule of the"
                    " model.",
                    evidence=f"Submodules: {', '.join(name for name, _ in model.named_children())}.",
                    fix=fix,
                    code="MT122",
                )
        return list(dict.fromkeys(names[id(block)] for block in blocks))

    def described(self) -> dict[str, str | int | None]:
        """Return the workload's identity for a config: file, object, SHA-256 of the source, global batch."""
        return {
            "file": self.path.name,
            "name": self.name,
            "source_sha256": self.source_sha256,
            "global_batch": self.global_batch,
        }

    def imports(self) -> dict[str, str]:
        """Return path and SHA-256 of the files next to and below `model.py` that were imported."""
        # Installed packages and memtune itself are left out: versions tell them apart.
        folder, found = self.path.parent, {}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if not isinstance(file, str) or name.partition(".")[0] == "memtune":
                continue
            if name.rpartition(".")[2].startswith(OPENED_AS):
                continue  # the `model.py` of another search in this process
            path = Path(os.path.abspath(file))
            if path == self.path or not path.is_relative_to(folder) or "site-packages" in path.parts:
                continue
            with contextlib.suppress(OSError):
                found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
        return dict(sorted(found.items()))

    def _call(self, name: str, *args: Any, fix: str, code: str = "MT114") -> Any:
        function: Callable[..., Any] | None = self._file.function(name)
        assert function is not None  # load checked the required ones, the callers the optional ones
        try:
            return function(*args)
        except _NOT_THE_USERS:
            raise
        # A script may call `sys.exit`, which must not end a search without a message.
        except (Exception, SystemExit) as error:
            # That is the result of a trial, not an error of the user's code.
            if is_out_of_memory(error):
                raise
            shown = f"batch({args[0]})" if name == "batch" else f"{name}()"
            message = raised_in_user_code(error, self.path, shown, fix=fix, code=code)
            if name == "loss":
                message.evidence = f"{message.evidence}   batch shapes: {_listed(shapes_of(args[1]))}".strip()
            raise message from error

    def _error(self, what: str, *, fix: str, code: str, evidence: str = "") -> WorkloadError:
        return WorkloadError(f"{self.path.name}: {what}", evidence=evidence, fix=fix, code=code)

    def _ignores_size(self, evidence: str) -> WorkloadError:
        return self._error(
            "batch(size) ignores its size.",
            evidence=evidence,
            fix="return tensors of `size` samples, as in  torch.randn(size, 3, 32, 32)",
            code="MT117",
        )


def _bytes_of(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(batch))


def _first_parameter(function: Callable[..., Any]) -> str:
    """Return the name of the first parameter; '' if there is none or a built-in has no signature."""
    with contextlib.suppress(ValueError):
        return next(iter(inspect.signature(function).parameters), "")
    return ""


def _described(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, int | float | str | bool):
        return f"the {type(value).__name__} {str(value)[:40]!r}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    article = "an" if type(value).__name__[:1].lower() in "aeio" else "a"
    return f"{article} {type(value).__name__}"


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes[:6])) + (", …" if len(shapes) > 6 else "")


@contextmanager
def autocast_cache(enabled: bool) -> Iterator[None]:
    """Let autocast contexts that are made meanwhile keep casts of weights, or make one for each op."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _requested_autocast() -> Iterator[None]:
    """Let autocast contexts record whether the user enabled them (`asked`)."""
    # Without CUDA, torch disables autocast contexts of CUDA, so their `enabled` does not tell.
    init = autocast.__init__

    def noted(
        self: Any,
        device_type: str,
        dtype: Any = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        self.asked = enabled
        init(self, device_type, dtype, enabled, cache_enabled)

    with replaced(autocast, __init__=noted):
        yield
