"""How many bytes an op will make, before it runs: asked of fake tensors once per op and shapes, corrected by what it made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from memtune.runtime.op_arguments import tensors_in

Key = tuple[Any, ...]
_MOST_KEYS = 1 << 16


def key_of(func: Any, args: Any, kwargs: Any) -> Key:
    """What sizes are looked up by: the op, shapes and types of tensors, all else as text."""
    return (func, *map(_plain, args), *((name, _plain(value)) for name, value in kwargs.items()))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value if value is None or isinstance(value, int | float | str) else str(value)


class OutputSizes:
    """Bytes of the storages that ops make."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[int, ...]] = {}

    def of(self, key: Key, func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
        """Bytes of each storage that `func` will make; none where that depends on the data and it has not run before."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _asked(func, args, kwargs)
        return found

    def learn(self, key: Key, made: tuple[int, ...]) -> None:
        """What was made; where that depends on the data, the largest sum so far is expected."""
        if len(self._known) > _MOST_KEYS:
            self._known.clear()
        if sum(made) > sum(self._known.get(key, ())):
            self._known[key] = made


def _asked(func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    twins: dict[int, Tensor] = {}

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in twins:
            twins[id(leaf)] = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        return twins[id(leaf)]

    with _disable_current_modes(), FakeTensorMode():
        try:
            given, named = tree_map(twin, (tuple(args), kwargs))
            out = func(*given, **named)
        except Exception:  # sizes that depend on data, ops without a fake implementation: known once they have run
            return ()
        old = {each.untyped_storage()._cdata for each in twins.values()}
        made: dict[int, int] = {}
        for each in tensors_in([out]):
            storage = each.untyped_storage()
            if storage._cdata not in old:
                made[storage._cdata] = storage.nbytes()
        return tuple(made.values())
