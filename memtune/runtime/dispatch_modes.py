"""Dispatch modes: one that torch.compile accepts while it is active, and the fake mode of recorded models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


def without_modes() -> AbstractContextManager[Any]:
    """Return a context without dispatch modes; a null context, which costs nothing, if none is active."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


class WatchingMode(TorchDispatchMode):  # torch's __init_subclass__
    """Mode under which compiled graphs are made and run; under any other active mode Dynamo runs eagerly."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: inactive while graphs are made, active while they run, so graphs that run op by op are
        observed op by op.
        """
        return True


class _Converter(FakeTensorConverter):
    """Converter that does not memoize outputs of ops, because `Module.to` cannot swap a parameter that has a
    weak reference.
    """

    def set_tensor_memo(self, t: torch.Tensor, v: FakeTensor) -> None:
        """Memoize real tensors only, which may be converted again."""
        if t.device.type != "meta":
            super().set_tensor_memo(t, v)


class OneFakeMode(FakeTensorMode):
    """One fake mode for a whole model that is recorded, or initialized later.

    A model may be built from deep copies of a layer (`nn.TransformerEncoder`), and the copy of a fake tensor
    copies the mode it belongs to as well: under another mode its views have storages of their own, so that
    each would count as new memory.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = _Converter()

    def __deepcopy__(self, memo: dict[int, Any]) -> OneFakeMode:
        return self
