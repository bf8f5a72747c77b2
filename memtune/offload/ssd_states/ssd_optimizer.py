"""The user's optimizer with master weights and state on SSD: they stream through a few host buffers while it
steps.

The optimizer object stays the user's own; its groups and its state hold tensors that lie on SSD, each
parameter's weight and moments in one piece. A step goes from parameter to parameter (Rajbhandari et al. 2021,
section 5.2.2, with reads, update and writes at once):

Rule 1. The pieces of the next `ahead` parameters are being read while one is updated.
Rule 2. Its gradient comes down and is let go on the device; one native pass updates the piece; the weight
goes up; the piece is
        written. `WRITES_IN_FLIGHT` pieces are being written at most: before another one begins, the oldest is
        finished.
Rule 3. When `step` returns, everything is written: a state dict, which reads the file, finds it there.
Rule 4. Of parameters that come and go (`offload.ssd_states.ssd_parameters`), gradients are on the host before
`step`, and the new weight
        goes to where it is kept: on the host, or to SSD, where it is written just before the piece and in
        memory as long. What of the gradients is on SSD (`offload.ssd_states.ssd_parameters`) is read with the
        piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.offload.core import model_order, optimizer_parameter, state_to_host, to_host_now
from memtune.offload.gradients import ExternalWrites, watch_loads
from memtune.offload.optimizer import (
    NativeUpdate,
    master_of,
    refuse_closure,
    refuse_others,
    zeros_in_order_of,
)
from memtune.program import WRITES_IN_FLIGHT
from memtune.runtime import (
    HOST,
    SSD,
    Context,
    PartialStep,
    keep_groups,
    local,
    mark,
    replace_step,
    tier,
    tier_of,
    transfer,
    with_hooks,
)
from memtune.ssd import LastStep, Piece, RecordSlots, Slots, ssd_tensors


class SsdOptimizer:
    """Moves an optimizer's weights and state to SSD.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        master: bfloat16 parameters have float32 masters.
        ahead: Pieces that are read ahead.
        keep: Every complete step is kept (`ssd.last_step`), and the newest one that was kept is taken up.
        chosen: What is moved; the optimizer's own step goes on for all else, and who chose says what is kept
            of it (`_keep_steps`). None: everything, and there is no own step.

    Raises:
        ApplyError: The optimizer or a parameter's type is none that the native update knows.
        EnvironmentFault: There is no room on SSD; says for which parameter.
    """

    def __init__(
        self,
        context: Context,
        *,
        master: bool,
        ahead: int,
        keep: bool = False,
        chosen: Collection[nn.Parameter] | None = None,
    ) -> None:
        placement = context.placement
        self._optimizer, self._ahead, self._master, self._keep = context.optimizer, ahead, master, keep
        self._native, self._half = NativeUpdate(context.optimizer, "float32"), PartialStep(context)
        names = {parameter: name for name, parameter in context.model.named_parameters()}
        names |= {
            shard: names[whole] for whole, shard in placement.optimizer_params.items() if whole in names
        }
        self._whole = {
            shard: whole for whole, shard in placement.optimizer_params.items()
        }  # both have the shard's gradient
        self._pieces: list[Piece] = []
        self._writing: deque[tuple[list[Tensor], list[Tensor]]] = deque()  # (on SSD, on the host)
        self._kept: dict[nn.Parameter, Tensor] = {}  # weights of parameters that come and go
        self._coming: dict[nn.Parameter, Tensor] = {}  # gradients that are read from SSD
        for group in self._optimizer.param_groups:
            mine = [each for each in group["params"] if chosen is None or each in chosen]
            moved = {each: self._move(each, group, names.get(each, "a parameter")) for each in mine}
            group["params"] = [moved[each].held if each in moved else each for each in group["params"]]
            self._pieces += moved.values()
        place = model_order(context)
        self._pieces.sort(key=lambda piece: place.get(piece.device, len(place)))
        placement.optimizer_params.update({piece.device: piece.held for piece in self._pieces})
        context.events.weights_loaded.subscribe(self._reload)
        keep_groups(self._optimizer)
        self._stale: set[nn.Parameter] = (
            set()
        )  # loaded into the model itself, and not on SSD until their next update
        if chosen is None:
            watch_loads(
                context,
                {piece.device for piece in self._pieces},
                self._stale.update,
                before=self._loads_begin,
            )
        self._optimizer.register_state_dict_pre_hook(lambda _: self.verify())
        if chosen is None:
            self._optimizer.register_load_state_dict_post_hook(
                lambda _: None if context.events.is_loading else self._take_in_state()
            )
        self._last: LastStep | None = None
        if keep and chosen is None:
            self._keep_steps(context, RecordSlots(self._pieces, self._optimizer))
        self._writes = ExternalWrites(context, (piece.device for piece in self._pieces if chosen is None))
        if chosen is None:
            replace_step(self._optimizer, with_hooks(self._optimizer, self._step))

    def _keep_steps(self, context: Context, kept: Slots) -> None:
        """Each complete step is kept from here on, and the newest one that was kept is taken up; nothing is
        of fake tensors.
        """
        if not any(isinstance(piece.ssd, FakeTensor) for piece in self._pieces):
            self._last = LastStep(context, kept)
            context.loop.resumed_steps = self._last.resume()
            context.events.finished.subscribe(self._last.finish)

    def _move(self, parameter: nn.Parameter, group: dict[str, Any], name: str) -> Piece:
        weight = master_of(to_host_now(local(parameter)), self._master)
        state = {key: state_to_host(value) for key, value in self._optimizer.state.pop(parameter, {}).items()}
        piece = self._piece(name, parameter, group, weight, state)
        mine = self._optimizer.state[piece.held]
        mine.update(state)
        mine.update(zip(piece.moments, piece.parts(piece.ssd)[1:], strict=True))
        self._count_steps(mine)
        return piece

    def _count_steps(self, state: dict[str, Any]) -> None:
        if self._native.counts_steps and "step" not in state:
            with tier(HOST):
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
            mark(state["step"], HOST)

    def _piece(
        self, name: str, parameter: nn.Parameter, group: dict[str, Any], weight: Tensor, state: dict[str, Any]
    ) -> Piece:
        """`weight`: the master, on the host as `state` is, which may hold no moments yet."""
        moments = self._native.moment_names(group)
        with tier(HOST):
            parts = [weight, *(state.get(each, torch.zeros_like(weight)) for each in moments)]
            together = torch.cat([part.detach().float().reshape(-1) for part in parts])
        ssd = self._on_ssd(together, name)
        spare = self._on_ssd(together, name) if self._keep else None
        held = optimizer_parameter(parameter, ssd[: weight.numel()].view(weight.shape))
        return Piece(name, parameter, held, ssd, group, moments, spare)

    def _on_ssd(self, host: Tensor, name: str) -> Tensor:
        ssd: Tensor = torch.ops.memtune.to_ssd(host, f"the optimizer state of {name}")
        ssd_tensors.written(ssd)
        mark(ssd, SSD)
        return ssd

    @torch.no_grad()
    def _step(self, closure: None = None) -> None:
        refuse_closure([closure], "offload: {states: {kind: none}}")
        refuse_others(self._optimizer, {piece.held for piece in self._pieces})
        with self._half.whole():
            self._update_all()

    def keep_in(self, kept: dict[nn.Parameter, Tensor]) -> None:
        """New weights of these parameters go there, not to the device; their gradients will be on the host
        (Rule 4).
        """
        self._kept.update(kept)
        for piece in self._pieces:
            if piece.device in kept and piece.held.dtype is not piece.device.dtype:
                piece.held.grad_dtype = piece.device.dtype

    def _loads_begin(self) -> None:
        """New weights will be loaded into a part of the model: nothing is under way between two steps."""

    def _take_writes(self) -> None:
        """What others have written on the device is what the next update begins with."""
        self._stale.update(self._writes.by_others(self._kept))

    def _update_all(self) -> None:
        self._take_writes()
        self._stream(
            [piece for piece in self._pieces if piece.device.grad is not None or piece.held.grad is not None]
        )

    def _stream(self, pieces: list[Piece]) -> None:
        read: deque[Tensor] = deque(map(self._read, pieces[: self._ahead]))
        for index, piece in enumerate(pieces):
            if not read:
                read.append(self._read(piece))
            new = self._update(piece, read[0], index)
            self._write(piece, read.popleft(), new)
            del new
            if self._ahead and index + self._ahead < len(pieces):
                read.append(self._read(pieces[index + self._ahead]))
        for ssd in [each for kept, _ in self._writing for each in kept]:
            ssd_tensors.written(ssd)
        if self._last is not None:
            self._last.complete()
        self._writing.clear()

    def _read(self, piece: Piece) -> Tensor:
        """Start reading it, and its gradient where that is on SSD."""
        host = self._brought(piece)
        gradient = piece.held.grad
        if gradient is not None and tier_of(gradient) == SSD:
            self._coming[piece.held] = torch.ops.memtune.from_ssd(gradient)
        return host

    def _brought(self, piece: Piece) -> Tensor:
        """The piece in host memory once what is under way into that is over."""
        host: Tensor = torch.ops.memtune.from_ssd(piece.ssd)
        return host

    def _put_back(self, piece: Piece, host: Tensor) -> None:
        """The piece is what is in `host`, from now on."""
        torch.ops.memtune.write_ssd_(piece.target, host)
        ssd_tensors.written(piece.target)
        self._turn(piece)

    def _write(self, piece: Piece, host: Tensor, new: tuple[Tensor, Tensor] | None = None) -> None:
        """Begin to write the piece; `new`: with its weight, which is being written to SSD from there (Rule
        4).
        """
        if len(self._writing) == WRITES_IN_FLIGHT:
            self._finish_oldest()
        torch.ops.memtune.write_ssd_(piece.target, host)
        ssd, memory = ([], []) if new is None else ([new[0]], [new[1]])
        self._writing.append(([piece.target, *ssd], [host, *memory]))
        self._turn(piece)

    def _turn(self, piece: Piece) -> None:
        """What is being written is the piece, once steps are kept; none is of fake tensors."""
        if self._last is not None:
            piece.turn(self._optimizer.state[piece.held])

    def _finish_oldest(self) -> None:
        for ssd in self._writing.popleft()[0]:
            ssd_tensors.written(ssd)

    def _update(self, piece: Piece, host: Tensor, seed: int) -> tuple[Tensor, Tensor] | None:
        """Update the piece in `host`, and hand its weight on; returns (on SSD, on the host) where that is
        being written.
        """
        gradient = self._gradient(piece)
        self._on_host(piece, host, gradient, seed)
        up = piece.parts(host)[0] if gradient.dtype is torch.float32 else gradient
        del gradient
        return self._hand_on(piece, up)

    def _hand_on(self, piece: Piece, up: Tensor) -> tuple[Tensor, Tensor] | None:
        """The new weight `up` goes where it is wanted; returns as `_update` does."""
        kept = self._kept.get(piece.device)
        if kept is None:
            torch.ops.memtune.copy_to_device_(local(piece.device), up)
            self._writes.wrote(piece.device)
        elif tier_of(kept) == SSD:
            torch.ops.memtune.write_ssd_(kept, up)
            return kept, up
        elif (
            kept.untyped_storage()._cdata != up.untyped_storage()._cdata
        ):  # where the master is on the host it may be both
            kept.copy_(up)
        return None

    def _gradient(self, piece: Piece) -> Tensor:
        """The gradient, on the host and no longer on the device."""
        parameter = piece.device
        landed = piece.held.grad if parameter.grad is None else None
        if landed is not None:  # came down as it landed
            piece.held.grad = None
            if (coming := self._coming.pop(piece.held, None)) is None:
                return landed
            transfer.finish(coming)
            return coming
        assert parameter.grad is not None
        gradient: Tensor = torch.ops.memtune.to_host(local(parameter.grad))
        mark(gradient, HOST)
        transfer.finish(gradient)
        parameter.grad = None
        if parameter in self._whole:
            self._whole[parameter].grad = None
        return gradient

    def _on_host(self, piece: Piece, host: Tensor, gradient: Tensor, seed: int) -> None:
        """Update the piece in `host`, once it has been read; a bfloat16 gradient's memory takes the new
        weight.
        """
        transfer.finish(host)
        weight, *moments = piece.parts(host)
        if piece.device in self._stale:
            self._stale.discard(piece.device)
            weight.copy_(self._weight(piece))
        state = self._optimizer.state[piece.held]
        self._adopt(piece, state, moments)
        here = {**state, **dict(zip(piece.moments, moments, strict=True))}
        self._native.one(self._settings_of(piece), weight, gradient, here, seed)

    def _settings_of(self, piece: Piece) -> dict[str, Any]:
        """Of its update."""
        return piece.group

    def _adopt(self, piece: Piece, state: dict[str, Any], moments: list[Tensor]) -> None:
        """State that was loaded since the last step is elsewhere: its values go into the piece, which takes
        its place again.

        Where none was loaded of a parameter, as of one that had no gradient yet, it begins anew.
        """
        self._count_steps(state)
        for name, host, own in zip(piece.moments, moments, piece.parts(piece.ssd)[1:], strict=True):
            value = state.get(name)
            if not _is_same(value, own):
                host.zero_() if value is None else host.copy_(value)
                state[name] = own

    def verify(self, only: Container[nn.Parameter] | None = None) -> None:
        """Check that what a state dict reads through the file's mapping, of all parameters or `only` some, is
        what was written.

        Raises:
            EnvironmentFault: It is not; says whose.
        """
        for piece in self._pieces:
            if only is None or piece.device in only:
                ssd_tensors.verified(piece.ssd)

    @torch.no_grad()
    def _take_in_state(self) -> None:
        """State that the optimizer has loaded goes to where it belongs, also that of what has no gradient in
        the next step.
        """
        for piece in self._pieces:
            state = self._optimizer.state[piece.held]
            if all(
                _is_same(state.get(name), own)
                for name, own in zip(piece.moments, piece.parts(piece.ssd)[1:], strict=True)
            ):
                continue
            host = self._brought(piece)
            transfer.finish(host)
            self._adopt(piece, state, piece.parts(host)[1:])
            self._put_back(piece, host)

    @torch.no_grad()
    def _reload(self) -> None:
        """The device's weights are others, and the state that was read is not on SSD yet."""
        self._stale.clear()
        for piece in self._pieces:
            self._take_in(piece)
        if self._last is not None:
            self._last.complete(steps=0)

    def _take_in(self, piece: Piece) -> None:
        """The piece has the weight and the state that were loaded."""
        host = self._brought(piece)
        transfer.finish(host)
        weight, *moments = piece.parts(host)
        weight.copy_(self._weight(piece))
        self._adopt(piece, self._optimizer.state[piece.held], moments)
        self._put_back(piece, host)

    def _weight(self, piece: Piece) -> Tensor:
        """What has been loaded, on the host."""
        kept = self._kept.get(piece.device)
        if kept is None:
            return to_host_now(local(piece.device))
        if tier_of(kept) != SSD:
            return kept
        host: Tensor = torch.ops.memtune.from_ssd(kept)
        transfer.finish(host)
        return host

    def check(self) -> dict[str, Any]:
        """Bytes on SSD.

        Raises:
            ApplyError: Some state is elsewhere.
        """
        for piece in self._pieces:
            state = self._optimizer.state[piece.held]
            if tier_of(piece.held) != SSD or any(
                tier_of(state[name]) != SSD for name in piece.moments if name in state
            ):
                raise ApplyError("Some of the optimizer's state is not on SSD.", code="MT309")
        slots = 1 + self._keep
        return {
            "parameters": len(self._pieces),
            "ssd_bytes": slots * sum(piece.ssd.nbytes for piece in self._pieces),
        }


def _is_same(value: Tensor | None, own: Tensor) -> bool:
    return value is not None and value.untyped_storage()._cdata == own.untyped_storage()._cdata


# The user's optimizer with master weights and moments in host memory, updated piece by piece as those on SSD
# are.
@dataclass(eq=False)
class HostPiece(Piece):
    """Weight and moments in tensors of their own: the weight's memory goes to a device, the moments' never
    does.
    """

    values: list[Tensor] = field(default_factory=list)

    def parts(self, of: Tensor) -> list[Tensor]:
        """Weight and moments; `of` is the weight, as nothing else is brought."""
        return self.values


class HostPieces(SsdOptimizer):
    """Moves an optimizer's weights and state to host memory.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        master: bfloat16 parameters have float32 masters.
        ahead: Gradients that are read ahead, of those that are on SSD.

    Raises:
        ApplyError: The optimizer or a parameter's type is none that the native update knows.
    """

    def _piece(
        self, name: str, parameter: nn.Parameter, group: dict[str, Any], weight: Tensor, state: dict[str, Any]
    ) -> Piece:
        names, weight = self._native.moment_names(group), weight.detach()
        with tier(HOST):
            moments = [
                state[each].float() if each in state else zeros_in_order_of(weight, torch.float32)
                for each in names
            ]
        for each in (weight, *moments):
            mark(each, HOST)
        return HostPiece(
            name,
            parameter,
            optimizer_parameter(parameter, weight),
            weight,
            group,
            names,
            values=[weight, *moments],
        )

    def _brought(self, piece: Piece) -> Tensor:
        return piece.ssd

    def _put_back(self, piece: Piece, host: Tensor) -> None:
        """It is there."""

    def _write(self, piece: Piece, host: Tensor, new: tuple[Tensor, Tensor] | None = None) -> None:
        """Rule 2."""
        if new is None:
            return
        if len(self._writing) == WRITES_IN_FLIGHT:
            self._finish_oldest()
        self._writing.append(([new[0]], [new[1]]))

    def verify(self, only: Container[nn.Parameter] | None = None) -> None:
        """There is no file of it."""

    def check(self) -> dict[str, Any]:
        """Bytes in host memory.

        Raises:
            ApplyError: Some state is elsewhere.
        """
        kept = [each for piece in self._pieces for each in (piece.held, *self._moments_of(piece))]
        if any(tier_of(each) != HOST for each in kept):
            raise ApplyError("Some of the optimizer's state is not on the host.", code="MT309")
        return {"parameters": len(self._pieces), "host_bytes": sum(each.nbytes for each in kept)}

    def _moments_of(self, piece: Piece) -> list[Tensor]:
        state = self._optimizer.state[piece.held]
        return [state[name] for name in piece.moments if name in state]
