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
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.offload.core import OffloadedParameter, Piece, host_values, own_grad, set_own_grad, ssd_values
from memtune.offload.parameters import ParameterOffloader, host_copy
from memtune.offload.ssd_states.ssd_optimizer import SsdOptimizer
from memtune.program import WRITES_IN_FLIGHT, Residency, ssd_reads_by_moment
from memtune.runtime import (
    HOST,
    Context,
    hide_grad_of,
    host_like,
    local,
    mark,
    tier,
    tier_of,
    transfer,
)
from memtune.ssd import ssd_tensors

ParameterTier = Literal["host", "ssd"]


class StepEndUpdates:
    """The interface that the offloader needs of an optimizer that does all its work in `step`."""

    def __init__(self, optimizer: SsdOptimizer) -> None:
        self.check = optimizer.check

    def leave_to_offloader(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do nothing: `SsdOptimizer.write_weights_to` names these parameters."""

    def update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Do nothing: `step` updates all."""


class TieredOffloader(ParameterOffloader):
    """Offloads the blocks' parameters of `context` to SSD or the host; `optimizer` updates them at the end of
    the step.

    Args:
        context: Its model; hooks are registered on its blocks and their parameters.
        residency: Units to free and load at each moment.
        optimizer: Of the same model, its state on SSD or on the host.
        read_ahead: Moments by which a block is read from SSD before its H2D copy.
        where: Tier of parameters between uses.
        gradients: Tier of gradients between grad-ready and the step.
        tiled: Tiled weights.

    Raises:
        ApplyError: A block's parameter is used outside of it.
        EnvironmentFault: There is no room on SSD; names the parameter.
    """

    def __init__(
        self,
        context: Context,
        residency: Residency,
        optimizer: SsdOptimizer,
        read_ahead: int,
        where: ParameterTier,
        gradients: ParameterTier = "host",
        tiled: Collection[nn.Parameter] = (),
    ) -> None:
        self._gradients: SsdGradients | None = None
        self._tiled = {id(each) for each in tiled}
        self._accessed: list[OffloadedParameter] = []  # on SSD, by the user, since the last read or step
        self._tile_sources: dict[Tensor, Tensor] = {}  # by SSD copy: host memory of a tiled weight
        # (tile in its D2H copy, host gradient that it is part of)
        self._tile_in_flight: list[tuple[Tensor, Tensor]] = []
        self._where, self._read_ahead = where, ssd_reads_by_moment(residency, read_ahead)
        self._reading: dict[Tensor, Tensor] = {}  # by SSD copy: host memory of its running read
        self.read_bytes = 0
        # `early=False`: records are updated in `step`, in the order of their reads.
        super().__init__(context, residency, StepEndUpdates(optimizer), early=False, copy=self._copy_in)
        optimizer.write_weights_to(self._hosts)
        if gradients == "ssd":
            self._gradients = SsdGradients(
                self._trained, {p: name for name, p in context.model.named_parameters()}
            )

    def _host_values(self, context: Context, mine: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Return the copies of parameters between uses (Rule 1)."""
        if self._where == "host":
            return {parameter: _on_host(context, parameter) for parameter in mine}
        names = {parameter: name for name, parameter in context.model.named_parameters()}
        return {parameter: ssd_values(context, parameter, names[parameter]) for parameter in mine}

    # -- gradients -------------------------------------------------------------------------------------------

    def _on_grad_ready(self, parameter: Any) -> None:
        # Each tile was averaged and offloaded when ready; autograd's own gradient is empty.
        if id(parameter) not in self._tiled:
            super()._on_grad_ready(parameter)

    def _offloaded_when_ready(self, block: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [each for each in super()._offloaded_when_ready(block) if id(each) not in self._tiled]

    def _offload_gradient(self, parameter: nn.Parameter) -> None:
        super()._offload_gradient(parameter)
        if self._gradients is not None:
            self._gradients.begin_offload(parameter)

    def _add_to_sum(self, parameter: nn.Parameter, host: Tensor) -> None:
        if self._gradients is None:
            super()._add_to_sum(parameter, host)
        else:
            self._gradients.arrived(parameter, host)

    def _take_gradient(self, parameter: nn.Parameter) -> None:
        is_changed = hide_grad_of(parameter)
        if is_changed and self._gradients is not None:
            self._gradients.take(parameter)

    def _add_at_once(self, parameter: nn.Parameter, host: Tensor) -> None:
        if self._gradients is None:
            super()._add_at_once(parameter, host)
        else:
            self._gradients.begin_offload(parameter)
            self._gradients.arrived(parameter, host)
            self._gradients.flush()

    def _backward_raised(self) -> None:
        super()._backward_raised()
        while self._tile_in_flight:
            transfer.abandon(self._tile_in_flight.pop()[1])
        if self._gradients is not None:
            self._gradients.flush()

    # -- access by the user ----------------------------------------------------------------------------------

    def _show_mapping(self, each: OffloadedParameter) -> None:
        if not isinstance(each.host, FakeTensor):
            each.expect_values(partial(self._on_access, each))

    def _on_access(self, each: OffloadedParameter) -> None:
        ssd_tensors.verified(each.host)
        each.settle()
        self._accessed.append(each)

    @torch.no_grad()
    def _write_accessed(self) -> None:
        """Write what the user has changed through the files' mapping, with its checksums (Rule 6)."""
        while self._accessed:
            each = self._accessed.pop()
            if each.adopt():
                self._write(each)
            self._show_mapping(each)

    def _write(self, each: OffloadedParameter) -> None:
        """Write the values that the parameter shows, and wait."""
        torch.ops.memtune.write_ssd_(each.host, host_copy(each.parameter))
        ssd_tensors.written(each.host)

    # -- reads -----------------------------------------------------------------------------------------------

    def _begin_moment(self, moment: int) -> None:
        is_same = moment == self._moment
        super()._begin_moment(moment)
        if is_same:
            return
        if moment == self._end and self._gradients is not None:
            self._gradients.flush()
        if self._where == "ssd":  # Rule 2
            # After the moment's own loads, which must not wait for reads of later ones.
            for unit in self._read_ahead[moment][1]:
                if unit not in self._resident:
                    self._read(self._units[unit])

    def _read(self, pieces: Iterable[Piece]) -> None:
        self._write_accessed()
        for piece in pieces:
            # Already being read, for an earlier moment that asked for it.
            if piece.host not in self._reading:
                self._reading[piece.host] = torch.ops.memtune.from_ssd(piece.host)
                self.read_bytes += piece.host.nbytes

    def _load_pieces(self, pieces: Iterable[Piece]) -> None:
        pieces = list(pieces)
        if self._where == "ssd":
            self._read(pieces)
        super()._load_pieces(
            # Tiles are loaded by the layer itself, so a tiled weight has no memory on the device.
            each
            for each in pieces
            if id(each.of[0].parameter) not in self._tiled
        )

    def _load_all(self) -> None:
        self._tiled.clear()
        self._tile_sources.clear()
        super()._load_all()

    def _free_units(self, units: Any) -> None:
        units = list(units)
        mine = [each for unit in units for piece in self._units[unit] for each in piece.of]
        for each in mine if self._where == "ssd" else ():
            if each.is_resident and each.adopt():
                self._write(each)
        super()._free_units(units)
        for each in mine if self._where == "ssd" else ():
            self._show_mapping(each)
        if not self._tile_sources:
            return
        # Also the current block: under FSDP2 its rows are freed before it computes (`fsdp_shards`).
        now = min(self._moment, self._end - 1 - self._moment)
        kept = {
            piece.host
            for unit in (*self._resident, *self._of_block[now][: now >= 0])
            for piece in self._units[unit]
        }
        self._tile_sources = {host: source for host, source in self._tile_sources.items() if host in kept}

    # -- tiles -----------------------------------------------------------------------------------------------

    def host_of(self, weight: nn.Parameter) -> Tensor:
        """Return the host memory of a tiled weight, from which its tiles are copied; read it from SSD if
        needed.
        """
        kept = self._hosts[weight]
        if self._where == "host":
            return kept
        self._write_accessed()
        if kept not in self._tile_sources:
            # The read that the moment has started, if the layer is reached in the expected order.
            read = self._reading.pop(kept, None)
            self._tile_sources[kept] = torch.ops.memtune.from_ssd(kept) if read is None else read
            self.read_bytes += kept.nbytes if read is None else 0
        return self._tile_sources[kept]

    @torch.no_grad()
    def on_tile_grad_ready(self, weight: nn.Parameter, rows: slice, gradient: Tensor) -> None:
        """Start the D2H copy of a tile's gradient; after the last tile, the whole gradient is offloaded as
        others are.
        """
        # One tile's copy at a time: the previous gradient is freed before the next one is made.
        before, host = self._tile_in_flight.pop() if self._tile_in_flight else (None, None)
        if host is None:
            host = host_like(local(weight))
            mark(host, HOST)
        transfer.finish(host)
        del before  # the tile before, whose copy has ended
        is_last = rows.stop == len(host)
        if is_last:
            self._finish_and_sum(self._in_flight.make_room(gradient.nbytes))
        torch.ops.memtune.copy_to_host_(host[rows], gradient)
        if is_last:
            self._in_flight.put((weight, gradient, host), gradient.nbytes)
            if self._gradients is not None:
                self._gradients.begin_offload(weight)
        else:
            self._tile_in_flight.append((gradient, host))

    def _copy_in(self, memory: Tensor, kept: Tensor) -> None:
        """Copy a parameter to the device; a host buffer that it was read into is freed after the copy."""
        host = kept if self._where == "host" else self._reading.pop(kept)
        torch.ops.memtune.copy_to_device_(memory, host)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Drop reads of values that the step replaces (Rule 4), and write what the user has changed."""
        self._tile_sources.clear()
        while self._reading:
            # Awaited: the drive writes into these buffers until the read has ended.
            transfer.abandon(self._reading.popitem()[1])
        super()._step_begins(optimizer, args, kwargs)
        self._write_accessed()

    def check(self) -> dict[str, Any]:
        """Return facts about the blocks' parameters and the bytes read, for the audit.

        Raises:
            ApplyError: Some are on the device between two steps, or some of the optimizer's state is not on
                its tier.
        """
        facts = super().check() | {"parameters_on": self._where, "parameter_bytes_read": self.read_bytes}
        return (
            facts
            if self._gradients is None
            else facts | {"gradient_bytes_written": self._gradients.written_bytes}
        )


def _on_host(context: Context, parameter: nn.Parameter) -> Tensor:
    """Return the host copy of `parameter`: the optimizer's replacement if its dtype is equal."""
    held = context.placement.optimizer_params.get(parameter)
    if held is not None and tier_of(held) == HOST and held.dtype is parameter.dtype:
        return held.detach()
    return host_values(context, parameter)


class SsdGradients:
    """Gradients on SSD, from grad-ready until the optimizer's step reads them (ZeRO-Infinity, section 5.1.1).

    Args:
        held: The optimizer's parameter of each parameter.
        names: Of the parameters, for errors.

    Raises:
        EnvironmentFault: There is no room on SSD; names the parameter.
    """

    def __init__(self, held: Mapping[nn.Parameter, nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
        self._held = held
        self._places = {parameter: _place(parameter, names[parameter]) for parameter in held}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._writing: deque[tuple[Tensor, Tensor]] = deque()  # (on SSD, on the host)
        self.written_bytes = 0

    def begin_offload(self, parameter: nn.Parameter) -> None:
        """Read the sum of earlier micro-batches while the D2H copy of the gradient runs."""
        if (left := self._sums.pop(parameter, None)) is not None:  # of a backward that raised
            transfer.abandon(left)
        # `grad` on SSD means that an earlier micro-batch of this step has left a sum there.
        if self._held[parameter].grad is not None:
            self._sums[parameter] = torch.ops.memtune.from_ssd(self._places[parameter])

    def arrived(self, parameter: nn.Parameter, host: Tensor) -> None:
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
    def take(self, parameter: nn.Parameter) -> None:
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


def _place(parameter: nn.Parameter, name: str) -> Tensor:
    with tier(HOST):
        # Reserved now, so that a full drive is reported by `apply` and not in the middle of a backward.
        nothing = torch.zeros(local(parameter).shape, dtype=parameter.dtype)
    return ssd_tensors.stored(nothing, f"the gradient of {name}")
