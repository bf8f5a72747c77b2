"""The fake mode in which models are built that are recorded, or made later."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode


class _Converter(FakeTensorConverter):
    """Forgets what an op returned at once: `Module.to` cannot swap a parameter that somebody refers to weakly."""

    def set_tensor_memo(self, t: torch.Tensor, v: FakeTensor) -> None:
        """Remembers real tensors only, which may come again."""
        if t.device.type != "meta":
            super().set_tensor_memo(t, v)


class OneFakeMode(FakeTensorMode):
    """One mode for a whole model.

    A model may be built from deep copies of a layer (`nn.TransformerEncoder`), and the copy of a fake tensor copies the mode it
    belongs to as well: under another mode its views have storages of their own, so that each would count as new memory.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = _Converter()

    def __deepcopy__(self, memo: dict[int, Any]) -> OneFakeMode:
        return self
