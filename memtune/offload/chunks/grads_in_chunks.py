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

from torch import Tensor, nn
from torch._C._autograd import _unsafe_set_version_counter as set_version

from memtune.offload.parameters import BlockGradients, BlockUnits, OffloadedBlocks


class GradientPlaces:
    """Places of the `gradients` of `blocks`: those of their weights in the chunks `units`."""

    def __init__(self, blocks: OffloadedBlocks, units: BlockUnits, gradients: BlockGradients) -> None:
        self._units, self._gradients = units, gradients
        units.before_load, units.on_free, gradients.place = self._clear, self._forget, self._copy_into_chunk
        self._overwritten: dict[int, list[nn.Parameter]] = {}
        """By chunk: parameters whose places hold their gradients."""
        self.placed_bytes = 0
        self._block_of = {each: index for index, block in enumerate(blocks.of_block) for each in block}
        self._owner_of = {
            each.parameter: (each, chunk)
            for chunk, pieces in enumerate(units.pieces)
            for piece in pieces
            for each in piece.of
        }

    def _copy_into_chunk(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """Copy the gradient to its weight's place and return that; None if the chunk is not resident."""
        owner, chunk = self._owner_of[parameter]
        if not owner.is_resident:
            return None
        place = parameter.detach()
        owner.free()  # before the copy, which changes the values on the device
        # Counted, on purpose: a backward that still reads the saved weight raises autograd's version error.
        place.copy_(gradient)
        self._overwritten.setdefault(chunk, []).append(parameter)
        self.placed_bytes += place.nbytes
        return place

    def _clear(self, block: int) -> None:
        """Free the chunks of `block` in which its gradients are, before the block runs again."""
        mine = {
            chunk
            for chunk in self._units.of_block[block]
            for each in self._overwritten.get(chunk, ())
            if self._block_of[each] == block
        }
        if mine:
            self._gradients.offloaded.finish_copies()
            # Freed before the reload, because a resident chunk would not be loaded again.
            self._units.free(sorted(mine))

    def _forget(self, unit: int) -> None:
        """Have the weights of `unit` back, which is freed."""
        for parameter in self._overwritten.pop(unit, ()):
            # The reload restores the weight that autograd saved, so its version becomes that of the saved
            # tensor.
            set_version((parameter,), (parameter._version - 1,))
