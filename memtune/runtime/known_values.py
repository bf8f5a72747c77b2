"""Values that follow from shapes and constants alone: positions, masks. Code may look at them without depending on its data.

While a region is captured its tensors are fake. Where code looks at one (`if mask.all():`), the answer is known if all ops
that made it started from constants: those ops are then done for real beside the fake ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from memtune.runtime.op_arguments import READ_OUTS, tensors_in

_MOST_ELEMENTS = 1 << 20


class KnownValues:
    """Real twins, on the host, of the fake integer and bool tensors that follow from constants."""

    def __init__(self) -> None:
        self._twin: Any = WeakIdKeyDictionary()

    def know(self, fake: Tensor, real: Tensor) -> None:
        """`fake` stands for `real`, a constant of the code."""
        if _is_kept(real):
            with _disable_current_modes():
                self._twin[fake] = real.detach().to("cpu", copy=True)

    def look(self, func: Any, args: Any) -> Any | None:
        """What `func` tells code of tensors that are known; None if it asks for nothing or something else."""
        if func not in READ_OUTS or any(each not in self._twin for each in tensors_in(args)):
            return None
        with _disable_current_modes():
            return func(*tree_map(self._real, args))

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any, *, writes: list[Tensor]) -> None:
        """`func` returned `out`: known where all that it read is known, and it drew nothing."""
        inputs = tensors_in([*args, *kwargs.values()])
        known = all(each in self._twin for each in inputs)
        for each in writes:  # views of it would have to follow
            self._forget(each)
        if writes or not known or not isinstance(out, Tensor) or not _is_kept(out):
            return
        if func is torch.ops.memtune.to_device.default:
            self._twin[out] = self._twin[args[0]]
            return
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten" or "empty" in str(func):
            return
        host = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs
        with _disable_current_modes():
            self._twin[out] = func(*tree_map(self._real, args), **tree_map(self._real, host))

    def _real(self, value: Any) -> Any:
        return self._twin[value] if isinstance(value, Tensor) else value

    def _forget(self, written: Tensor) -> None:
        address = written.untyped_storage()._cdata
        for each in [t for t in self._twin if t.untyped_storage()._cdata == address]:
            del self._twin[each]


def _is_kept(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= _MOST_ELEMENTS


@contextmanager
def unnoticed() -> Iterator[None]:
    """Inside, transformers takes fake tensors for real ones, and so the path that it takes in training.

    Where it then looks at what follows from data, the capture refuses.
    """
    module: Any = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if original is None:
        yield
        return
    module.is_fake_tensor = lambda _: False
    try:
        yield
    finally:
        module.is_fake_tensor = original
