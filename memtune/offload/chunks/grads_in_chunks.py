"""Offload of gradients from the places of their weights in the chunks, as in PatrickStar.

When a gradient is ready, no later op of this backward needs its weight, and the host has the weight's values:
the gradient is copied to the weight's place, autograd's gradient is freed at once, and the D2H copy may take
until the chunk is evicted. `offload.parameters.parameter_offload_pass` predicts it with `in_place`.

- Until its chunk is loaded again such a weight is on the host (`offload.core.offloaded_parameter`). Its
  version differs from the one that autograd saved, so a backward that reads it raises autograd's own error.
  The version is restored when the chunk is evicted, since the reload restores the weight.
- A block that is called again while its gradients are in place waits for their D2H copies and reloads its
  weights.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch._C._autograd import _unsafe_set_version_counter as set_version

from memtune.offload.core import Chunks
from memtune.offload.parameters import HostCopies, ParameterOffloader
from memtune.program import Residency
from memtune.runtime import Context


class GradientsInPlace(ParameterOffloader):
    """Offloads the blocks' parameters of `context` in chunks, in which gradients overwrite their weights.

    Args:
        context: As in `ParameterOffloader`.
        residency: As there.
        optimizer: As there.
        chunks: Layout of the blocks' parameters.
        members: As there.

    Raises:
        ApplyError: As `ParameterOffloader` does.
    """

    def __init__(
        self,
        context: Context,
        residency: Residency,
        optimizer: HostCopies,
        *,
        chunks: Chunks,
        members: list[list[nn.Parameter]] | None = None,
    ) -> None:
        self._overwritten: dict[int, list[nn.Parameter]] = {}
        """By chunk: parameters whose places hold their gradients."""
        self._placed_bytes = 0
        super().__init__(context, residency, optimizer, chunks=chunks, early=False, members=members)
        self._block_of = {each: index for index, block in enumerate(self._blocks) for each in block}
        self._chunk_of = dict(zip(self._block_of, chunks.chunk, strict=True))
        self._owner_of = {each.parameter: each for each in self._offloaded()}

    def _offload_gradient(self, parameter: nn.Parameter) -> None:
        """Copy the gradient to its weight's place, or offload it directly if the chunk is not resident."""
        chunk, owner = self._chunk_of[parameter], self._owner_of[parameter]
        if not owner.is_resident:
            super()._offload_gradient(parameter)
            return
        assert parameter.grad is not None
        place = parameter.detach()
        owner.free()  # before the copy, which changes the values on the device
        # Counted, on purpose: a backward that still reads the saved weight raises autograd's version error.
        place.copy_(parameter.grad)
        parameter.grad = None
        self._overwritten.setdefault(chunk, []).append(parameter)
        self._placed_bytes += place.nbytes
        self._start_copy(parameter, place)

    def _load_block(self, block: int) -> None:
        """Wait for gradients in the block's chunks and reload them before the block runs again."""
        mine = [each for each in self._of_block[block] if self._has_gradients(each, block)]
        if mine:
            self._finish_copies()
            # Freed before the reload, because a resident chunk would not be loaded again.
            self._free_units(mine)
        super()._load_block(block)

    def _has_gradients(self, chunk: int, block: int) -> bool:
        return any(self._block_of[each] == block for each in self._overwritten.get(chunk, ()))

    def _free_units(self, units: Any) -> None:
        units = list(units)
        for parameter in (each for unit in units for each in self._overwritten.pop(unit, ())):
            # The reload restores the weight that autograd saved, so its version becomes that of the saved
            # tensor.
            set_version((parameter,), (parameter._version - 1,))
        super()._free_units(units)

    def check(self) -> dict[str, Any]:
        """Return facts about the blocks' parameters, and the bytes of gradients copied to their places."""
        return super().check() | {"placed_bytes": self._placed_bytes}
