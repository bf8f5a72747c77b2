"""The user's optimizer with master weights and state on SSD, streamed through a few host buffers in `step`.

The optimizer object is the user's own; its groups and state hold tensors on SSD. The weight and moments of a
parameter are one record (`memtune.ssd.Piece`). A step goes from parameter to parameter (Rajbhandari et al.
2021, ZeRO-Infinity, section 5.2.2), with reads, updates and writes overlapped:

    read the record, `read_ahead` records early ─┐
    D2H copy of the gradient, then freed ────────┴─► native update ──► H2D copy of the weight ──► write

- At most `WRITES_IN_FLIGHT` records are written at once; before another write starts, the oldest is finished.
- When `step` returns, all writes have finished: a state dict reads the file.
- Offloaded parameters (`offload.parameters.ssd_values`): gradients are on the host or SSD before `step`;
  one on SSD is read with the record. The new weight is written to the parameter's host or SSD copy, just
  before the record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.offload.core import (
    host_values,
    model_order,
    optimizer_parameter,
    own_grad,
    state_to_host,
    to_host_now,
)
from memtune.offload.gradients import ExternalWrites, watch_loads
from memtune.offload.optimizer import NativeUpdate, master_of, refuse_added_parameters, zeros_in_order_of
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
from memtune.ssd import LastStep, Piece, RecordSlots, ssd_tensors


class SsdOptimizer:
    """Moves an optimizer's weights and state to SSD, and updates them in `step`.

    Updates at other times set its hooks: `SsdOverlappedOptimizer`, `LockFreeOnSsd`, `ExpertOptimizer`.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        master: bfloat16 parameters have float32 masters.
        read_ahead: Records that are read ahead.
        keep: Every complete step is kept (`ssd.last_step`), and training resumes from the newest one.
        chosen: The parameters to move, whose steps are not kept. The optimizer's own step updates all others,
            and the caller updates these and adopts loads. None: all parameters, and no own step.
        on_host: Records are in host memory; they are neither read nor written.

    Raises:
        ApplyError: The native update does not support the optimizer or a parameter's type.
        EnvironmentFault: There is no room on SSD; names the parameter.

    Attributes:
        pieces: The records, in the order of updates.
        stale: Weights newer on the device (loaded or written by the user) than in their records.
        update_all: Makes the updates of a step.
        settle: Finishes updates that run outside of the step, before state is read.
        drop: Drops these, before loaded weights and state are adopted.
        before_load: Called before a part of the model loads weights.
    """

    def __init__(
        self,
        context: Context,
        *,
        master: bool,
        read_ahead: int,
        keep: bool = False,
        chosen: Collection[nn.Parameter] | None = None,
        on_host: bool = False,
    ) -> None:
        placement = context.placement
        self.optimizer = context.optimizer
        self._read_ahead = read_ahead
        self._master = master
        self._keep = keep
        self._on_host = on_host
        self._native, self.partial_step = NativeUpdate(context.optimizer, "float32"), PartialStep(context)
        names = {parameter: name for name, parameter in context.model.named_parameters()}
        names |= {
            shard: names[whole] for whole, shard in placement.optimizer_params.items() if whole in names
        }
        # A sharded parameter and its shard both have the gradient, which must be freed at both.
        self._unsharded = {shard: whole for whole, shard in placement.optimizer_params.items()}
        self.pieces: list[Piece] = []
        self._writing: deque[list[tuple[Tensor, Tensor]]] = deque()  # (on SSD, on the host)
        self.offloaded_weights: dict[nn.Parameter, Tensor] = {}  # host or SSD copies of offloaded parameters
        self._gradient_reads: dict[nn.Parameter, Tensor] = {}  # gradients that are being read from SSD
        for group in self.optimizer.param_groups:
            mine = [each for each in group["params"] if chosen is None or each in chosen]
            # The group changes only when all of its records exist.
            moved = {each: self._move(context, each, group, names.get(each, "a parameter")) for each in mine}
            group["params"] = [moved[each].held if each in moved else each for each in group["params"]]
            self.pieces += moved.values()
        place = model_order(context)
        # Records are updated in the model's order, not the groups': the pass inserts its ops in that order.
        self.pieces.sort(key=lambda piece: place.get(piece.device, len(place)))
        placement.optimizer_params.update({piece.device: piece.held for piece in self.pieces})
        self.update_all, self.settle, self.drop = self.update_in_step, _nothing, _nothing
        self.before_load: Callable[[], None] = _nothing
        keep_groups(self.optimizer)
        self.stale: set[nn.Parameter] = set()
        # A state dict would pass on changed bytes as if they were the state.
        self.optimizer.register_state_dict_pre_hook(lambda _: self._before_state_dict())
        if chosen is None:
            self._watch_loads(context)
        self._last = self._resumed(context) if keep else None
        self.writes = ExternalWrites(context, (piece.device for piece in self.pieces if chosen is None))
        if chosen is None:
            replace_step(self.optimizer, with_hooks(self.optimizer, self._step))

    def _watch_loads(self, context: Context) -> None:
        """Adopt weights and state that are loaded."""
        context.events.weights_loaded.subscribe(self._reload)
        watch_loads(
            context,
            {piece.device for piece in self.pieces},
            self.stale.update,
            before=lambda: self.before_load(),
        )
        self.optimizer.register_load_state_dict_post_hook(
            lambda _: None if context.events.is_loading else self._adopt_loaded_state()
        )

    def _resumed(self, context: Context) -> LastStep | None:
        """Return the keeper of complete steps, resumed from those of an earlier run."""
        # A recording or a dry run must not take over the records of a real run.
        if any(isinstance(piece.ssd, FakeTensor) for piece in self.pieces):
            return None
        last = LastStep(context, RecordSlots(self.pieces, self.optimizer))
        context.loop.resumed_steps = last.resume()
        context.events.finished.subscribe(last.finish)
        return last

    def _move(self, context: Context, parameter: nn.Parameter, group: dict[str, Any], name: str) -> Piece:
        weight = master_of(host_values(context, parameter), self._master)
        state = {key: state_to_host(value) for key, value in self.optimizer.state.pop(parameter, {}).items()}
        piece = self._piece(name, parameter, group, weight, state)
        mine = self.optimizer.state[piece.held]
        mine.update(state)
        mine.update(zip(piece.moments, piece.parts(piece.ssd)[1:], strict=True))
        self._count_steps(mine)
        return piece

    def _count_steps(self, state: dict[str, Any]) -> None:
        # torch makes the count in its own step, which does not run here.
        if self._native.counts_steps and "step" not in state:
            with tier(HOST):
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
            mark(state["step"], HOST)

    def _piece(
        self, name: str, parameter: nn.Parameter, group: dict[str, Any], weight: Tensor, state: dict[str, Any]
    ) -> Piece:
        """Build the record of a parameter on the device from its `weight` and `state` on the host."""
        moments = self._native.moment_names(group)
        # Moments exist from the first step on, as zeros, so that a record has its final size at once.
        if self._on_host:
            weight = weight.detach()
            with tier(HOST):
                parts = [
                    state[each].float() if each in state else zeros_in_order_of(weight, torch.float32)
                    for each in moments
                ]
            for part in (weight, *parts):
                mark(part, HOST)
            held = optimizer_parameter(parameter, weight)
            return Piece(name, parameter, held, weight, group, moments, values=[weight, *parts])
        with tier(HOST):
            parts = [weight, *(state.get(each, torch.zeros_like(weight)) for each in moments)]
            # One contiguous record: one read and one write per parameter, instead of three.
            together = torch.cat([part.detach().float().reshape(-1) for part in parts])
        what = f"the optimizer state of {name}"
        ssd = ssd_tensors.stored(together, what)
        spare = ssd_tensors.stored(together, what) if self._keep else None
        # The optimizer's parameter is a view of the file's mapping; reading it reads SSD.
        held = optimizer_parameter(parameter, ssd[: weight.numel()].view(weight.shape))
        return Piece(name, parameter, held, ssd, group, moments, spare)

    @torch.no_grad()
    def _step(self) -> None:
        refuse_added_parameters(self.optimizer, {piece.held for piece in self.pieces})
        with self.partial_step.step_updates():
            self.update_all()

    def write_weights_to(self, kept: dict[nn.Parameter, Tensor]) -> None:
        """Write new weights of these to `kept`, not to the device; gradients are offloaded before `step`."""
        if not self.offloaded_weights:
            self.writes.ignore_rows(kept)  # their memory changes at each load
        self.offloaded_weights.update(kept)
        for piece in self.pieces:
            if piece.device in kept and piece.held.dtype is not piece.device.dtype:
                # A float32 master gets gradients in the parameter's own dtype; torch would refuse them
                # otherwise.
                piece.held.grad_dtype = piece.device.dtype

    def update_in_step(self) -> None:
        """Update all parameters that have a gradient, from weights that the user may have written."""
        self.stale.update(self.writes.take_external())
        self.stream(
            [each for each in self.pieces if each.device.grad is not None or each.held.grad is not None]
        )

    def stream(
        self,
        pieces: list[Piece],
        update: Callable[[Piece, Tensor, int], tuple[Tensor, Tensor] | None] | None = None,
    ) -> None:
        """Read, update (by `update`, which also stores the weight) and write `pieces`, overlapped.

        Args:
            pieces: The records.
            update: Updates a record that is being read, and stores its weight; None: `_update`.
        """
        update = self._update if update is None else update
        # Reads of the first records overlap with the D2H copy and the update of the first.
        read: deque[Tensor] = deque(map(self._start_read, pieces[: self._read_ahead]))
        for index, piece in enumerate(pieces):
            if not read:
                read.append(self._start_read(piece))
            # The record stays in `read` until it is updated, so that host memory is held by the queue alone.
            new = update(piece, read[0], index)
            self.write(piece, read.popleft(), new)
            # A reference here would hold the written memory one record longer than the queue of writes does.
            del new
            if self._read_ahead and index + self._read_ahead < len(pieces):
                read.append(self._start_read(pieces[index + self._read_ahead]))
        # All must be written before `complete` declares the step complete.
        self.finish_writes()
        if self._last is not None:
            self._last.complete()

    def _start_read(self, piece: Piece) -> Tensor:
        """Start reading the record, and its gradient if that is on SSD."""
        host = self.load(piece)
        gradient = piece.held.grad
        if gradient is not None and tier_of(gradient) == SSD:
            self._gradient_reads[piece.held] = torch.ops.memtune.from_ssd(gradient)
        return host

    def load(self, piece: Piece) -> Tensor:
        """Start reading the record into host memory."""
        host: Tensor = piece.ssd if self._on_host else torch.ops.memtune.from_ssd(piece.ssd)
        return host

    def write_now(self, piece: Piece, host: Tensor) -> None:
        """Write the record from `host` and wait."""
        if not self._on_host:
            torch.ops.memtune.write_ssd_(piece.target, host)
            ssd_tensors.written(piece.target)
            self._swap_slots(piece)

    def write(self, piece: Piece, host: Tensor, new: tuple[Tensor, Tensor] | None = None) -> None:
        """Start writing the record from `host`, which is held until the write has finished, as is `new`."""
        writes = [] if self._on_host else [(piece.target, host)]
        writes += [] if new is None else [new]
        if writes and len(self._writing) == WRITES_IN_FLIGHT:
            # Bounds host memory: a written record is freed when its write has finished.
            self._finish_oldest()
        if not self._on_host:
            torch.ops.memtune.write_ssd_(piece.target, host)
        if writes:
            self._writing.append(writes)
        self._swap_slots(piece)

    def _swap_slots(self, piece: Piece) -> None:
        """Make the slot that is being written the current one, if steps are kept."""
        if self._last is not None:  # None also for fake tensors
            piece.switch(self.optimizer.state[piece.held])

    def _finish_oldest(self) -> None:
        for ssd, _ in self._writing.popleft():
            ssd_tensors.written(ssd)

    def finish_writes(self) -> None:
        """Wait for all writes."""
        while self._writing:
            self._finish_oldest()

    def _update(self, piece: Piece, host: Tensor, seed: int) -> tuple[Tensor, Tensor] | None:
        """Update the record in `host`, store its weight; return (on SSD, on the host) if it is written."""
        gradient = self.take_gradient(piece)
        self.update(piece, host, gradient, seed)
        new = new_weight(piece, host, gradient)
        del gradient
        return self._store_weight(piece, new)

    def _store_weight(self, piece: Piece, up: Tensor) -> tuple[Tensor, Tensor] | None:
        """Copy the new weight to the device, the host or SSD; return as `_update` does."""
        kept = self.offloaded_weights.get(piece.device)
        if kept is None:
            torch.ops.memtune.copy_to_device_(local(piece.device), up)
            self.writes.note_write(piece.device)
        elif tier_of(kept) == SSD:
            torch.ops.memtune.write_ssd_(kept, up)
            return kept, up
        # A float32 master on the host is the parameter's host copy itself.
        elif kept.untyped_storage()._cdata != up.untyped_storage()._cdata:
            kept.copy_(up)
        return None

    def take_gradient(self, piece: Piece) -> Tensor:
        """Return the gradient on the host, and free it on the device."""
        parameter = piece.device
        on_host = piece.held.grad if own_grad(parameter) is None else None
        if on_host is not None:  # offloaded when it was ready
            piece.held.grad = None
            if (coming := self._gradient_reads.pop(piece.held, None)) is None:
                return on_host
            transfer.finish(coming)
            return coming
        assert parameter.grad is not None
        gradient: Tensor = torch.ops.memtune.to_host(local(parameter.grad))
        mark(gradient, HOST)
        transfer.finish(gradient)
        parameter.grad = None
        if parameter in self._unsharded:
            self._unsharded[parameter].grad = None
        return gradient

    def update(
        self, piece: Piece, host: Tensor, gradient: Tensor, seed: int, settings: dict[str, Any] | None = None
    ) -> None:
        """Update the record in `host` after its read has finished; a bfloat16 gradient's memory receives the
        new weight.

        Args:
            piece: The record.
            host: Its values.
            gradient: On the host.
            seed: Of stochastic rounding.
            settings: None: those of its parameter group.
        """
        transfer.finish(host)
        # The last moment: the gradient's D2H copy has overlapped with this read.
        weight, *moments = piece.parts(host)
        if piece.device in self.stale:
            self.stale.discard(piece.device)
            weight.copy_(self.weight(piece))
        state = self.optimizer.state[piece.held]
        self.adopt_state(piece, state, moments)
        # The step counter is on the host; the moments are those just read.
        here = {**state, **dict(zip(piece.moments, moments, strict=True))}
        self._native.one(piece.group if settings is None else settings, weight, gradient, here, seed)

    def adopt_state(self, piece: Piece, state: dict[str, Any], moments: list[Tensor]) -> None:
        """Copy state loaded since the last step into the record, and the record's moments into `state`."""
        # Moments that are absent (a parameter without a gradient so far) start at zero.
        self._count_steps(state)
        for name, host, own in zip(piece.moments, moments, piece.parts(piece.ssd)[1:], strict=True):
            value = state.get(name)
            # `load_state_dict` replaces tensors, so a loaded moment is one with other storage than the
            # record's.
            if not _is_same(value, own):
                host.zero_() if value is None else host.copy_(value)
                state[name] = own

    def verify(self, only: Container[nn.Parameter] | None = None) -> None:
        """Check that a state dict reads what was written, through the file's mapping.

        Args:
            only: Parameters to check; None: all.

        Raises:
            EnvironmentFault: A record was changed; names the parameter.
        """
        for piece in () if self._on_host else self.pieces:
            if only is None or piece.device in only:
                ssd_tensors.verified(piece.ssd)

    def _before_state_dict(self) -> None:
        self.settle()
        self.verify()

    @torch.no_grad()
    def _adopt_loaded_state(self) -> None:
        """Write state that the optimizer has loaded to SSD, also of parameters without a gradient."""
        for piece in self.pieces:
            state = self.optimizer.state[piece.held]
            if all(
                _is_same(state.get(name), own)
                for name, own in zip(piece.moments, piece.parts(piece.ssd)[1:], strict=True)
            ):
                continue
            host = self.load(piece)
            transfer.finish(host)
            # The whole record is read, because it can only be written as a whole.
            self.adopt_state(piece, state, piece.parts(host)[1:])
            self.write_now(piece, host)

    @torch.no_grad()
    def _reload(self) -> None:
        """Write the weights and state that were loaded to SSD."""
        self.drop()
        self.stale.clear()
        for piece in self.pieces:
            self.adopt_loaded(piece)
        if self._last is not None:
            self._last.complete(steps=0)

    def adopt_loaded(self, piece: Piece) -> None:
        """Write the loaded weight and state of one parameter to its record."""
        host = self.load(piece)
        transfer.finish(host)
        weight, *moments = piece.parts(host)
        weight.copy_(self.weight(piece))
        self.adopt_state(piece, self.optimizer.state[piece.held], moments)
        self.write_now(piece, host)

    def weight(self, piece: Piece) -> Tensor:
        """Return the loaded weight, on the host."""
        kept = self.offloaded_weights.get(piece.device)
        if kept is None:
            return to_host_now(local(piece.device))
        if tier_of(kept) != SSD:
            return kept
        # Through the mapping: what the user has written there has no checksum yet.
        with tier(HOST):
            return kept.clone()

    def check(self) -> dict[str, Any]:
        """Return the bytes in records, for the audit.

        Raises:
            ApplyError: Some state is not in its record's memory.
        """
        where, name = (HOST, "the host") if self._on_host else (SSD, "SSD")
        for piece in self.pieces:
            state = self.optimizer.state[piece.held]
            mine = [piece.held, *(state[each] for each in piece.moments if each in state)]
            if any(tier_of(each) != where for each in mine):
                raise ApplyError(f"Some of the optimizer's state is not on {name}.", code="MT309")
        n_bytes = sum(part.nbytes for piece in self.pieces for part in piece.parts(piece.ssd))
        key = "host_bytes" if self._on_host else "ssd_bytes"
        return {"parameters": len(self.pieces), key: (1 + self._keep) * n_bytes}


def new_weight(piece: Piece, host: Tensor, gradient: Tensor) -> Tensor:
    """Return the weight that an update of the record in `host` has written."""
    # The native update writes a bfloat16 weight into the gradient's memory, which saves a buffer.
    return piece.parts(host)[0] if gradient.dtype is torch.float32 else gradient


def _nothing() -> None:
    pass


def _is_same(value: Tensor | None, own: Tensor) -> bool:
    return value is not None and value.untyped_storage()._cdata == own.untyped_storage()._cdata
