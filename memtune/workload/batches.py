"""Structure of a batch: tensors in lists, tuples, dicts, dataclasses and mappings such as Hugging Face's
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
    """A copy of `batch` with every tensor replaced by `change(tensor)`; the containers keep their types."""
    return _map(batch, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def map_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of `batch` with everything in its containers replaced by `change(it)`."""
    return _map(batch, change)


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors in `batch`, in the order in which its containers hold them."""
    found: list[Tensor] = []
    map_tensors(batch, found.append)
    return found


def shapes_of(batch: Any) -> list[tuple[int, ...]]:
    """The shape of each tensor in `batch`, in order."""
    return [tuple(tensor.shape) for tensor in tensors_of(batch)]


def batch_size_of(batch: Any) -> int | None:
    """The number of samples: the first dimension that most tensors of `batch` share; None if no tensor has
    one.
    """
    sizes = Counter(tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim() > 0)
    return int(sizes.most_common(1)[0][0]) if sizes else None


def to_device(batch: Any, device: torch.device | str, copy: Callable[[Tensor], Tensor] | None = None) -> Any:
    """`batch` on `device`: tensors by `copy`, by default `.to`; leaves with a `.to` (a PyG batch, a
    PackedSequence) by that.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and copy is not None:
            return copy(leaf)
        return leaf.to(device) if isinstance(leaf, Tensor) or callable(getattr(leaf, "to", None)) else leaf

    return _map(batch, move)


def split_batch(batch: Any, parts: int, size: int | None = None) -> list[Any] | str:
    """Cuts `batch` into `parts` equal micro-batches, or returns the reason why it cannot be cut.

    Every tensor whose first dimension is the batch size is cut into views; so is a list of that length which
    holds no such tensor (the targets of a detector). All else is the same object in every part.

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
    if isinstance(value, Tensor | PackedSequence) or is_leaf(value):
        return change(value)
    if isinstance(value, Mapping):
        items = {key: _map(item, change, is_leaf) for key, item in value.items()}
        if type(value) is dict:
            return items
        new = copy.copy(value)  # keeps what else a BatchEncoding or a ModelOutput carries
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
