"""`detach` of DTensors whose rows are on another device: FSDP2's shards while they are offloaded.

Torch makes the result on the device of the rows, and then fails to make it share the storage of the DTensor,
which is on another one. `Module.state_dict` detaches each parameter.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

_CLASS: Any = DTensor


def detach_offloaded_rows() -> None:
    """Let `DTensor.detach` return rows that are on another device as they are; once per process."""
    own = _CLASS.detach
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def detach(self: DTensor) -> Tensor:
        rows = self._local_tensor
        found: Tensor = (
            own(self)
            if rows.device == self.device
            else _CLASS(rows.detach(), self._spec, requires_grad=False)
        )
        return found

    _CLASS.detach = detach
