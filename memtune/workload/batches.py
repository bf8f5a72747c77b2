"""Batches as nested containers of tensors: lists, tuples, dicts, dataclasses, and mappings like
BatchEncoding.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return `batch` with every tensor replaced by `change(tensor)`; containers keep their types."""
    return _map(batch, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def map_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of `batch` with every leaf replaced by `change(leaf)`."""
    return _map(batch, change)


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors in `batch`, in container order."""
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


def shapes_of(batch: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in `batch`, in order."""
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


def batch_size_of(batch: Any) -> int | None:
    """Return the number of samples: the most frequent first dimension; None if no tensor has a dimension."""
    sizes = Counter(tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim() > 0)
    return int(sizes.most_common(1)[0][0]) if sizes else None


def to_device(batch: Any, device: torch.device | str, copy: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Return `batch` on `device`.

    Tensors are copied by `copy` if it is given. Tensors otherwise, and other leaves with a `.to` (a PyG
    batch, a PackedSequence), are copied by their `.to`.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and copy is not None:
            return copy(leaf)
        return leaf.to(device) if isinstance(leaf, Tensor) or callable(getattr(leaf, "to", None)) else leaf

    return _map(batch, move)


def split_batch(batch: Any, parts: int, size: int | None = None) -> list[Any] | str:
    """Split `batch` into `parts` equal micro-batches; return the reason if it cannot be split.

    A tensor whose first dimension is the batch size is split into views. A list of that length without such
    tensors (the targets of a detector) is sliced. All other leaves are the same objects in every part.

    Args:
        batch: Return value of the user's `batch(size)`.
        parts: Number of micro-batches; must divide the size.
        size: Samples in `batch`; by default the first dimension that most of its tensors share.
    """
    samples = batch_size_of(batch) if size is None else size
    if samples is None or all(
        tensor.dim() == 0 or tensor.shape[0] != samples for tensor in tensors_of(batch)
    ):
        return (
            f"no tensor of the batch has its {samples or ''} samples as first dimension; shapes:"
            f" {shapes_of(batch)}"
        )
    if parts < 1 or samples % parts:
        return f"{parts} micro-batches do not divide a batch of {samples} samples"
    each = samples // parts

    def part(index: int) -> Any:
        def cut(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples:
                return leaf.narrow(0, index * each, each)
            return leaf[index * each : (index + 1) * each] if is_sample_list(leaf) else leaf

        return _map(batch, cut, is_leaf=is_sample_list)

    def is_sample_list(value: Any) -> bool:
        if type(value) is not list or len(value) != samples or value is batch:
            return False
        return all(tensor.dim() == 0 or tensor.shape[0] != samples for tensor in tensors_of(value))

    return [part(index) for index in range(parts)]


def _map(value: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """Return `value` with `change` applied to its leaves; containers keep their types."""
    if isinstance(value, Tensor | PackedSequence) or is_leaf(value):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: _map(item, change, is_leaf) for key, item in value.items()}
        if type(value) is dict:
            return items
        new = copy.copy(value)  # keeps further attributes of a BatchEncoding or ModelOutput
        for key, item in items.items():
            new[key] = item  # type: ignore[index]
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, change, is_leaf) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_map(item, change, is_leaf) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        twin = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(twin, field.name, _map(getattr(value, field.name), change, is_leaf))
        return twin
    return change(value)
