"""Block parameters on SSD or the host, updated record by record in the optimizer's step (ZeRO-Infinity,
sections 5.1 and 6.2).

Rules on top of those of `offload.parameters.offloader` and `offload.ssd_states.ssd_optimizer`:

Rule 1. A parameter has a copy in its own dtype, apart from its master weight and moments; forward and
  backward read only the copy. On the host, a master of the same dtype is the copy. A parameter that is not
  trained has the copy alone.
Rule 2. Loads are three levels deep: while a moment computes, units of the next moments are copied from the
  host (the residency's window), and units of the `read_ahead` moments after those are read from SSD. A unit
  that is used but not being read is read synchronously.
Rule 3. Host memory of a read is freed after the H2D copy.
Rule 4. Reads for a use that did not happen are dropped when the step begins, because it writes new values.
Rule 5. Tiled weights (`offload.tiles.tiled_weights`) are read and updated with their block, and are never on
  the device as a whole. Their host memory is freed with their block.
Rule 6. Between uses a parameter on SSD shows the mapping of its file, which is verified at the first access.
  What the user writes there is written again, with its checksum, before the next read.

States of a unit (`offload.core.offloaded_parameter` has those of its parameters):

    SSD --read--> host buffer --H2D copy--> resident (buffer freed) --free--> SSD
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.offload.core import (
    OffloadedParameter,
    Piece,
    adopt_together,
    host_values,
    own_grad,
    set_own_grad,
    to_host_now,
)
from memtune.offload.parameters.block_units import BlockUnits
from memtune.program import WRITES_IN_FLIGHT, Residency, ssd_reads_by_moment
from memtune.runtime import HOST, SSD, Context, local, memory_of, tier, tier_of, transfer
from memtune.ssd import ssd_tensors

ParameterTier = Literal["host", "ssd"]


def on_ssd(context: Context) -> Callable[[nn.Parameter], Tensor]:
    """Return a function that returns the copy of a parameter on SSD, or raises with its name (Rule 1)."""
    names = {parameter: name for name, parameter in context.model.named_parameters()}
    return lambda parameter: _ssd_values(context, parameter, names[parameter])


def _ssd_values(context: Context, parameter: nn.Parameter, name: str) -> Tensor:
    """Return a tensor on SSD with the values of `parameter`: its own if it rests there.

    Raises:
        EnvironmentFault: There is no room on SSD; names the parameter.
    """
    if parameter in context.placement.at_rest and tier_of(memory := memory_of(parameter)) == SSD:
        return memory
    return ssd_tensors.stored(host_values(context, parameter), f"the weight {name}")


K = TypeVar("K")


class Mappings(Generic[K]):
    """Mappings of files on SSD that parameters show between uses (Rule 6).

    Args:
        verify: Called with a key at the first access to one of its parameters.
        write: Called with a key whose parameters the user has written through the mapping.
    """

    def __init__(self, verify: Callable[[K], object], write: Callable[[K], None]) -> None:
        self._verify, self._write = verify, write
        self._accessed: dict[K, Sequence[OffloadedParameter]] = {}  # by the user, since the last `adopt`

    def map_for_access(self, key: K, parameters: Sequence[OffloadedParameter]) -> None:
        """Have these parameters, which are not on the device, verified together at the first access."""
        for each in parameters:
            if not isinstance(each.host, FakeTensor):
                each.expect_values(partial(self._on_access, key, parameters))

    def _on_access(self, key: K, parameters: Sequence[OffloadedParameter]) -> None:
        self._verify(key)
        for each in parameters:
            each.settle()
        self._accessed[key] = parameters

    def write(self) -> None:
        """Write what the user has changed."""
        for key, parameters in self._accessed.items():
            if adopt_together(parameters):
                self._write(key)

    def adopt(self) -> None:
        """Write what the user has changed, and have the next access verified again."""
        if self._accessed:
            self.write()
            accessed, self._accessed = self._accessed, {}
            for key, parameters in accessed.items():
                self.map_for_access(key, parameters)


class SsdValues:
    """Values of block parameters that are on SSD between uses, and read ahead.

    Args:
        residency: Of the units of the parameters.
        read_ahead: Moments by which a block is read from SSD before its H2D copy.
    """

    def __init__(self, residency: Residency, read_ahead: int) -> None:
        self._read_ahead = ssd_reads_by_moment(residency, read_ahead)
        self._reading: dict[Tensor, Tensor] = {}  # by SSD copy: host memory of its running read
        self._of_tiles: dict[Tensor, Tensor] = {}  # by SSD copy: host memory of a tiled weight
        self._mappings: Mappings[OffloadedParameter] = Mappings(
            lambda each: ssd_tensors.verified(each.host), self._write
        )
        self.read_bytes = 0

    def start_read(self, pieces: Iterable[Piece]) -> None:
        """Start reading the values of `pieces`, except those that are being read."""
        self._mappings.adopt()
        for piece in pieces:
            # Already being read, for an earlier moment that asked for it.
            if piece.host not in self._reading:
                self._reading[piece.host] = self._start(piece.host)

    def _start(self, kept: Tensor) -> Tensor:
        self.read_bytes += kept.nbytes
        host: Tensor = torch.ops.memtune.from_ssd(kept)
        return host

    def read_ahead(self, units: BlockUnits) -> None:
        """Start the reads of the moment that runs (Rule 2)."""
        for unit in self._read_ahead[units.moment][1]:
            if unit not in units.resident:
                self.start_read(units.pieces[unit])

    def copy(self, memory: Tensor, host: Tensor) -> None:
        """Copy a parameter to the device from the buffer that it was read into, which is freed."""
        torch.ops.memtune.copy_to_device_(memory, self._reading.pop(host))

    def tiled(self, kept: Tensor) -> Tensor:
        """Return host memory with the values of a tiled weight, read from SSD if needed (Rule 5)."""
        self._mappings.adopt()
        if kept not in self._of_tiles:
            # The read that the moment has started, if the layer is reached in the expected order.
            read = self._reading.pop(kept, None)
            self._of_tiles[kept] = self._start(kept) if read is None else read
        return self._of_tiles[kept]

    def free(self, parameters: Iterable[OffloadedParameter]) -> None:
        """Write what the user has changed of these parameters, which are about to be freed."""
        for each in parameters:
            if each.is_resident and each.adopt():
                self._write(each)

    def freed(self, parameters: Iterable[OffloadedParameter], units: BlockUnits) -> None:
        """Show the mappings of `parameters`, and free the memory of tiled weights with their blocks."""
        for each in parameters:
            self._mappings.map_for_access(each, (each,))
        if self._of_tiles:
            # Also the current block: under FSDP2 its rows are freed before it computes (`fsdp_shards`).
            last = len(self._read_ahead) - 2
            now = min(units.moment, last - units.moment)
            mine = (*units.resident, *(units.of_block[now] if now >= 0 else ()))
            kept = {piece.host for unit in mine for piece in units.pieces[unit]}
            self._of_tiles = {host: source for host, source in self._of_tiles.items() if host in kept}

    def drop(self) -> None:
        """Drop reads of values that the step replaces (Rule 4)."""
        self._of_tiles.clear()
        while self._reading:
            # Awaited: the drive writes into these buffers until the read has ended.
            transfer.abandon(self._reading.popitem()[1])

    def adopt(self) -> None:
        """Write what the user has changed through the files' mapping, with its checksums (Rule 6)."""
        self._mappings.adopt()

    @torch.no_grad()
    def _write(self, each: OffloadedParameter) -> None:
        """Write the values that the parameter shows, and wait."""
        torch.ops.memtune.write_ssd_(each.host, to_host_now(local(each.parameter)))
        ssd_tensors.written(each.host)


class SsdGradients:
    """Gradients on SSD, from grad-ready until the optimizer's step reads them (ZeRO-Infinity, section 5.1.1).

    Args:
        context: Of the model.
        held: The optimizer's parameter of each parameter.

    Raises:
        EnvironmentFault: There is no room on SSD; names the parameter.
    """

    def __init__(self, context: Context, held: Mapping[nn.Parameter, nn.Parameter]) -> None:
        names = {parameter: name for name, parameter in context.model.named_parameters()}
        self._held = held
        self._places = {parameter: _placeholder(parameter, names[parameter]) for parameter in held}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._writing: deque[tuple[Tensor, Tensor]] = deque()  # (on SSD, on the host)
        self.written_bytes = 0

    def begin(self, parameter: nn.Parameter) -> None:
        """Read the sum of earlier micro-batches while the D2H copy of the gradient runs."""
        if (left := self._sums.pop(parameter, None)) is not None:  # of a backward that raised
            transfer.abandon(left)
        # `grad` on SSD means that an earlier micro-batch of this step has left a sum there.
        if self._held[parameter].grad is not None:
            self._sums[parameter] = torch.ops.memtune.from_ssd(self._places[parameter])

    def add(self, parameter: nn.Parameter, host: Tensor) -> None:
        """Add the sum of earlier micro-batches to a gradient on the host, and start writing it."""
        if (so_far := self._sums.pop(parameter, None)) is not None:
            transfer.finish(so_far)
            with tier(HOST):
                host.add_(so_far)
            del so_far
        if len(self._writing) == WRITES_IN_FLIGHT:
            self._finish_oldest()
        place = self._places[parameter]
        torch.ops.memtune.write_ssd_(place, host)
        self.written_bytes += host.nbytes
        self._writing.append((place, host))
        # The mapping of the file: the optimizer, and a check for clipping, find the gradient as usual.
        set_own_grad(self._held[parameter], place)

    @torch.no_grad()
    def write_changed(self, parameter: nn.Parameter) -> None:
        """Write what the user has made of a gradient, with its checksum."""
        place, gradient = self._places[parameter], own_grad(self._held[parameter])
        if gradient is not None:
            set_own_grad(self._held[parameter], place)
            with tier(HOST):
                torch.ops.memtune.write_ssd_(place, gradient.clone())
            ssd_tensors.written(place)

    def flush(self) -> None:
        """Wait for all writes."""
        while self._writing:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        ssd_tensors.written(self._writing.popleft()[0])


def _placeholder(parameter: nn.Parameter, name: str) -> Tensor:
    with tier(HOST):
        # Reserved now, so that a full drive is reported by `apply` and not in the middle of a backward.
        nothing = torch.zeros(local(parameter).shape, dtype=parameter.dtype)
    return ssd_tensors.stored(nothing, f"the gradient of {name}")
