"""A store whose gradients take the place of their weights in the chunks, as PatrickStar's do, and leave for the host from there.

Three rules beyond those of `runtime.store`, which `passes.stream` follows with `in_place`:

Rule 1. When a gradient has landed nothing of this backward needs the weight, and the host has its values: the gradient is copied
        to where the weight was, what autograd made is let go at once, and the copy down has until the chunk goes.
Rule 2. Until its chunk comes in anew, such a weight is as one that is let go (`runtime.let_go`): who reads it is told so, and
        the model is not copied. What autograd saved of it has another version: a backward that reads it all the same raises
        autograd's own error. The version is as it was again when the chunk goes, since the weight will be.
Rule 3. A block that is called again while its gradients are there (Rule 6 of `runtime.store`) waits until they have left, and its
        weights come in anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _unsafe_set_version_counter as set_version

from memtune.chunks import Chunks
from memtune.residency import Residency
from memtune.runtime.context import Context
from memtune.runtime.host_parameters import HostCopies
from memtune.runtime.let_go import let_go
from memtune.runtime.store import ParameterStore


class GradientsInPlace(ParameterStore):
    """Makes the blocks' parameters of `context` come and go, in chunks whose weights give way to their gradients.

    Args:
        context: As `ParameterStore` has it.
        residency: As there.
        optimizer: As there.
        chunks: Where the blocks' parameters lie.
        members: As there.

    Raises:
        ApplyError: As `ParameterStore` does.
    """

    def __init__(
        self, context: Context, residency: Residency, optimizer: HostCopies, *, chunks: Chunks,
        members: list[list[nn.Parameter]] | None = None,
    ) -> None:  # fmt: skip
        self._overwritten: dict[int, list[nn.Parameter]] = {}
        """By chunk, parameters whose gradients are in their place."""
        self._placed_bytes = 0
        super().__init__(context, residency, optimizer, chunks=chunks, early=False, members=members)
        self._block_of = {each: index for index, block in enumerate(self._blocks) for each in block}
        self._chunk_of = dict(zip(self._block_of, chunks.chunk, strict=True))

    @torch.no_grad()
    def _landed(self, parameter: Tensor) -> None:
        """Rule 1; a gradient that lands when its chunk has gone leaves from where it is."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        chunk = self._chunk_of[parameter]
        if chunk not in self._there:
            super()._landed(parameter)
            return
        self._average(parameter)
        place = parameter.detach()
        place.copy_(parameter.grad)
        parameter.grad = None
        let_go((parameter,))
        self._overwritten.setdefault(chunk, []).append(parameter)
        self._placed_bytes += place.nbytes
        self._leaves(parameter, place)

    def _fetch_block(self, block: int) -> None:
        """Rule 3."""
        mine = [each for each in self._of_block[block] if self._has_gradients(each, block)]
        if mine:
            self._arrive()
            self._release(mine)
        super()._fetch_block(block)

    def _has_gradients(self, chunk: int, block: int) -> bool:
        return any(self._block_of[each] == block for each in self._overwritten.get(chunk, ()))

    def _release(self, units: Any) -> None:
        units = list(units)
        for parameter in (each for unit in units for each in self._overwritten.pop(unit, ())):  # Rule 2
            set_version((parameter,), (parameter._version - 1,))
        super()._release(units)

    def check(self) -> dict[str, Any]:
        """Where the blocks' parameters are, and the bytes of gradients that took their place."""
        return super().check() | {"placed_bytes": self._placed_bytes}
