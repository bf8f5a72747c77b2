"""Blocks' parameters kept on SSD or on the host, updated piece by piece in the step (ZeRO-Infinity, section
5.1 and 6.2).

Five rules on top of those of `offload.parameters.offloader`, and of `offload.ssd_states.ssd_optimizer` or,
with masters on the host, `offload.ssd_states.ssd_optimizer`:

Rule 1. A parameter's values are kept once more, in its own type and apart from its master weight and moments:
backward and
        forward read only them. Where they are to be on the host, and a master of that type is there, they are
        the master's own. A parameter that is not trained is kept there alone.
Rule 2. Three deep: while a moment computes, units of the next moments come up from the host (the residency's
window), and those
        that come up within the `ahead` moments after it are read from SSD. What is asked for and not being
        read is read then.
Rule 3. What was read is let go on the host when it has come up.
Rule 4. What was read for a use that did not come is dropped when the step begins: it writes new values.
Rule 5. Weights that come in tiles (`offload.tiles.tiled_weights`) are read and updated with their block, and
never whole on the device
        but while a state dict is loaded. What was read of them is let go when their block is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.offload.core import Piece
from memtune.offload.parameters import ParameterOffloader, copy_of
from memtune.offload.ssd_states.ssd_optimizer import SsdOptimizer
from memtune.program import WRITES_IN_FLIGHT, Residency, reads_ahead
from memtune.runtime import HOST, SSD, Context, host_like, local, mark, tier, tier_of, transfer
from memtune.ssd import ssd_tensors

Where = Literal["host", "ssd"]


class AtTheEnd:
    """What the store knows of an optimizer that does all its work in `step`."""

    def __init__(self, optimizer: SsdOptimizer) -> None:
        self.check = optimizer.check

    def leave_down(self, parameters: Iterable[nn.Parameter]) -> None:
        """`SsdOptimizer.keep_in` says so."""

    def update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Not before `step`."""


class KeptParameters(ParameterOffloader):
    """Makes the blocks' parameters of `context` come and go, updated by `optimizer` at the end of the step.

    Args:
        context: Its model; hooks are put on its blocks and their parameters.
        residency: Which block is on the device when.
        optimizer: Of the same model, its state on SSD or on the host.
        ahead: Moments by which a block is read from SSD before it comes up.
        where: Between uses.
        gradients: Where those are from landing until the step.
        tiled: Weights that come in tiles.

    Raises:
        ApplyError: A block's parameter is used outside of it, or nothing outside of the blocks is trained.
        EnvironmentFault: There is no room on SSD; says for which parameter.
    """

    def __init__(
        self,
        context: Context,
        residency: Residency,
        optimizer: SsdOptimizer,
        ahead: int,
        where: Where,
        gradients: Where = "host",
        tiled: Collection[nn.Parameter] = (),
    ) -> None:
        self._gradients: SsdGradients | None = None
        self._tiled, self._is_whole = {id(each) for each in tiled}, False
        self._tiled_on_host: set[int] = set()
        self._sources: dict[Tensor, Tensor] = {}  # of tiles, by what is on SSD
        self._down: list[
            tuple[Tensor, Tensor]
        ] = []  # the tile on its way, and the gradient that it becomes part of
        self._where, self._ahead = where, reads_ahead(residency, ahead)
        self._reading: dict[Tensor, Tensor] = {}  # by what is on SSD: where it comes to
        self.read_bytes = 0
        super().__init__(context, residency, AtTheEnd(optimizer), early=False, copy=self._up)
        optimizer.keep_in(self._hosts)
        self._tiled_on_host = {id(self._hosts[each]) for each in tiled}
        if gradients == "ssd":
            self._gradients = SsdGradients(
                self._trained, {p: name for name, p in context.model.named_parameters()}
            )

    def _kept(self, context: Context, mine: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Rule 1."""
        if self._where == "host":
            return {
                parameter: _on_host(parameter, context.placement.optimizer_params.get(parameter))
                for parameter in mine
            }
        names = {parameter: name for name, parameter in context.model.named_parameters()}
        return {parameter: self._on_ssd(parameter, names[parameter]) for parameter in mine}

    def _on_ssd(self, parameter: nn.Parameter, name: str) -> Tensor:
        ssd: Tensor = torch.ops.memtune.to_ssd(copy_of(parameter), f"the weight {name}")
        ssd_tensors.written(ssd)
        mark(ssd, SSD)
        return ssd

    # -- gradients -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _landed(self, parameter: Tensor) -> None:
        if id(parameter) in self._tiled:  # its tiles have landed before autograd comes to it, with nothing
            return
        super()._landed(parameter)
        if self._gradients is not None:
            assert isinstance(parameter, nn.Parameter)
            self._gradients.starts_down(parameter)

    def _arrived(self, parameter: nn.Parameter, host: Tensor) -> None:
        if self._gradients is None:
            super()._arrived(parameter, host)
        else:
            self._gradients.arrived(parameter, host)

    def _backward_raised(self) -> None:
        super()._backward_raised()
        while self._down:
            transfer.abandon(self._down.pop()[1])
        if self._gradients is not None:
            self._gradients.flush()

    # -- reads -----------------------------------------------------------------------------------------------

    def _begin(self, moment: int) -> None:
        is_same = moment == self._moment
        super()._begin(moment)
        if is_same:
            return
        if moment == self._end and self._gradients is not None:
            self._gradients.flush()
        if self._where == "ssd":  # Rule 2
            for unit in self._ahead[moment][1]:
                if unit not in self._there:
                    self._read(self._units[unit])

    def _read(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.host not in self._reading:
                self._reading[piece.host] = torch.ops.memtune.from_ssd(piece.host)
                self.read_bytes += piece.host.nbytes

    def _bring_pieces(self, pieces: Iterable[Piece]) -> None:
        pieces = list(pieces)
        if self._where == "ssd":
            self._read(pieces)
        super()._bring_pieces(
            each for each in pieces if self._is_whole or id(each.host) not in self._tiled_on_host
        )

    def _bring_all(self) -> None:
        self._is_whole = True
        self._sources.clear()
        super()._bring_all()

    def _release(self, units: Any) -> None:
        super()._release(units)
        if not self._sources:
            return
        now = min(
            self._moment, self._end - 1 - self._moment
        )  # rows of a block are let go before it computes (`gathered_rows`)
        kept = {
            piece.host
            for unit in (*self._there, *self._of_block[now][: now >= 0])
            for piece in self._units[unit]
        }
        self._sources = {host: source for host, source in self._sources.items() if host in kept}

    # -- tiles -----------------------------------------------------------------------------------------------

    def host_of(self, weight: nn.Parameter) -> Tensor:
        """Rule 5: where its tiles come from."""
        kept = self._hosts[weight]
        if self._where == "host":
            return kept
        if kept not in self._sources:
            read = self._reading.pop(kept, None)
            self._sources[kept] = torch.ops.memtune.from_ssd(kept) if read is None else read
            self.read_bytes += kept.nbytes if read is None else 0
        return self._sources[kept]

    @torch.no_grad()
    def tile_landed(self, weight: nn.Parameter, rows: slice, gradient: Tensor) -> None:
        """Rule 3 of `offload.tiles.tiled_weights`."""
        self._averaged.add(weight)
        before, whole = self._down.pop() if self._down else (None, None)
        if whole is None:
            whole = host_like(local(weight))
            mark(whole, HOST)
        transfer.finish(whole)
        del before
        is_last = rows.stop == len(whole)
        if is_last:
            self._arrive_all(self._on_the_way.let_go(gradient.nbytes))
        torch.ops.memtune.copy_to_host_(whole[rows], gradient)
        if is_last:
            self._on_the_way.put((weight, gradient, whole), gradient.nbytes)
            if self._gradients is not None:
                self._gradients.starts_down(weight)
        else:
            self._down.append((gradient, whole))

    def _up(self, there: Tensor, kept: Tensor) -> None:
        """Rule 3."""
        host = kept if self._where == "host" else self._reading.pop(kept)
        torch.ops.memtune.copy_to_device_(there, host)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Rule 4."""
        self._sources.clear()
        while self._reading:
            transfer.abandon(self._reading.popitem()[1])
        super()._step_begins(optimizer, args, kwargs)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _into_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for parameter in module.parameters(recurse=False) if self._where == "ssd" else ():
            if parameter in self._hosts:
                ssd_tensors.verified(self._hosts[parameter])
        super()._into_state_dict(module, state, prefix, metadata)

    @torch.no_grad()
    def _fetch_whole(self, block: int) -> None:
        """Through the mapping: `Tuned.load` has read into it, past the checksums, which `_keep` makes
        anew.
        """
        self._sources.clear()
        if self._lacks_memory(block):
            self._release(self._of_block[block])
        if self._where == "host":
            self._is_whole = True
            super()._fetch_whole(block)
            self._is_whole = False
            return
        for unit in set(self._of_block[block]) - self._there:
            self._there.add(unit)
            for piece in self._units[unit]:
                if (reading := self._reading.pop(piece.host, None)) is not None:
                    transfer.abandon(reading)
                piece.take()
                with _unsafe_preserve_version_counter(piece.there):
                    piece.there.detach().copy_(piece.host)

    def _lacks_memory(self, block: int) -> bool:
        """Not once it is whole: what a module around this one has loaded by then is there alone."""
        pieces = (piece for unit in self._of_block[block] for piece in self._units[unit])
        return any(each.host.nbytes and not each.there.untyped_storage().nbytes() for each in pieces)

    @torch.no_grad()
    def _keep(self, loaded: list[nn.Parameter]) -> None:
        if self._where == "host":
            super()._keep(loaded)
            return
        for parameter in loaded:
            torch.ops.memtune.write_ssd_(self._hosts[parameter], copy_of(parameter))
            ssd_tensors.written(self._hosts[parameter])

    def check(self) -> dict[str, Any]:
        """Where the blocks' parameters are, and what has been read of them.

        Raises:
            ApplyError: Some are on the device between two steps, or some of the optimizer's state is not
                where it belongs.
        """
        facts = super().check() | {"parameters_on": self._where, "parameter_bytes_read": self.read_bytes}
        return (
            facts
            if self._gradients is None
            else facts | {"gradient_bytes_written": self._gradients.written_bytes}
        )


def _on_host(parameter: nn.Parameter, held: nn.Parameter | None) -> Tensor:
    """Where the values of `parameter` are kept on the host; `held`: what the optimizer has in its place."""
    if held is not None and tier_of(held) == HOST and held.dtype is parameter.dtype:
        return held.detach()
    return copy_of(parameter)


# Gradients on SSD, from when they have landed on the host until the optimizer's step reads them
# (ZeRO-Infinity, section 5.1.1).
class SsdGradients:
    """The places, and what is on its way to them.

    Args:
        held: By parameter, what the optimizer holds in its place.
        names: Of the parameters, for errors.

    Raises:
        EnvironmentFault: There is no room on SSD; says for which parameter.
    """

    def __init__(self, held: Mapping[nn.Parameter, nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
        self._held = held
        self._places = {parameter: _place(parameter, names[parameter]) for parameter in held}
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._writing: deque[tuple[Tensor, Tensor]] = deque()  # (on SSD, on the host)
        self.written_bytes = 0

    def starts_down(self, parameter: nn.Parameter) -> None:
        """Rule 2: its copy to the host has begun."""
        if (left := self._sums.pop(parameter, None)) is not None:  # of a backward that ended in an error
            transfer.abandon(left)
        if self._held[parameter].grad is not None:
            self._sums[parameter] = torch.ops.memtune.from_ssd(self._places[parameter])

    def arrived(self, parameter: nn.Parameter, host: Tensor) -> None:
        """Rules 1 and 2."""
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
        self._held[parameter].grad = place

    def flush(self) -> None:
        """Everything is written."""
        while self._writing:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        ssd_tensors.written(self._writing.popleft()[0])


def _place(parameter: nn.Parameter, name: str) -> Tensor:
    with tier(HOST):
        nothing = torch.zeros(local(parameter).shape, dtype=parameter.dtype)
    ssd: Tensor = torch.ops.memtune.to_ssd(nothing, f"the gradient of {name}")
    ssd_tensors.written(ssd)
    mark(ssd, SSD)
    return ssd
