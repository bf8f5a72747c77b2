"""Gradients of offloaded blocks: from the grad-ready hook to the sum on the host, and to the user's eyes.

    grad ready --> averaged (replicas, a block at once) --> D2H copy --> sum of micro-batches --> update
                                                                              ^ shown as `grad` until the step

- Gradients in D2H copies are bounded in bytes, so the device's peak does not depend on the link's speed.
- The sum is `grad` of the optimizer's parameter, in host memory or on SSD (`ssd_values`).
- From the end of backward to the next forward or step the parameter's `grad` is the sum, which the user may
  change. Where that cannot be, versions of all gradients are noted, so that changes are found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune import refusals
from memtune.errors import ApplyError
from memtune.offload.core import PendingUpdates, own_grad, set_own_grad
from memtune.offload.gradients import WatchedGradients
from memtune.offload.optimizer import add_gradient
from memtune.offload.parameters.block_units import OffloadedBlocks
from memtune.parallel.replicas import GradientReducer
from memtune.runtime import (
    HOST,
    Context,
    EarlyUpdates,
    hide_grad_of,
    host_like,
    local,
    mark,
    run_last,
    show_grad_of,
    to_host_together,
    transfer,
    weakly,
    without_grad,
)

if TYPE_CHECKING:
    from memtune.offload.parameters.ssd_values import SsdGradients


class BlockGradients:
    """Offloads the gradients of `blocks` when they are ready.

    Args:
        context: Of the model.
        blocks: Their parameters.
        averages: Ranks are replicas, and average gradients before they are offloaded, a block at once. None:
            where DDP leaves those of blocks to the offloader.
        when_ready: Otherwise the optimizer's step offloads them.
        room_bytes: Bound of gradients in D2H copies at once; 0: one gradient.
        sums: Of a step's micro-batches; None: in host memory.
        tiled: Parameters whose gradients are offloaded by rows (`offload_rows`), averaged already.
        before_use: Called with parameters whose gradients are about to be used inside backward.

    Raises:
        ApplyError: Ranks are replicas and no component averages their gradients.

    Attributes:
        place: Copies a gradient to memory on the device, from which it is offloaded, and returns that.
        reducer: Averages them among replicas; None: there is one rank, or another component does.
        early: Updates inside backward, which later gradients must not follow; None: there are none.
        is_taken: False: gradients of this micro-batch remain on the device.
        held: A list: ready gradients are put here, and their copies start later; None: they start at once.
    """

    def __init__(
        self,
        context: Context,
        blocks: OffloadedBlocks,
        *,
        averages: bool | None = None,
        when_ready: bool = True,
        room_bytes: int = 0,
        sums: SsdGradients | None = None,
        tiled: Collection[nn.Parameter] = (),
        before_use: Callable[[list[nn.Parameter]], None] | None = None,
    ) -> None:
        placement, ranks = context.placement, context.placement.world_size
        if averages is None:
            # DDP's runner skips the blocks' gradients, which are averaged here before they are offloaded.
            averages = placement.offload.averages == "blocks" and context.loop.runner is not None
            if when_ready and blocks.are_all and ranks > 1 and blocks.gathered is None and not averages:
                raise ApplyError(
                    "Gradients that are offloaded when ready would not be averaged among ranks.",
                    fix="sharding: {states: {kind: fsdp}}",
                    code="MT364",
                )
        self._blocks, self._trained = blocks, blocks.trained
        self._sums = sums
        self._before_use, self._before_grad_use = before_use, context.events.before_grad_use
        self.early: EarlyUpdates | None = None
        self.place: Callable[[nn.Parameter, Tensor], Tensor | None] | None = None
        self.is_taken, self.when_ready = True, when_ready
        self.held: list[tuple[nn.Parameter, Tensor]] | None = None
        # D2H copies: (parameter, its gradient on the device, the host copy).
        self._in_flight: PendingUpdates[tuple[nn.Parameter, Tensor, Tensor]] = PendingUpdates(room_bytes)
        self._n_started = 0  # copies, in this moment
        self._rows: tuple[Tensor, Tensor] | None = None  # in a copy, and the host gradient they are part of
        resident, offloaded = (blocks.outside, list(self._trained.values())) if when_ready else ([], [])
        self._version_check = WatchedGradients(
            context, resident, offloaded, "offload: {states: {kind: optimizer_cpu}}, or no clipping"
        )
        # Experts' gradients are averaged in the step only.
        self.shows = when_ready and not (
            placement.offload.averages == "experts" and ranks > 1 and blocks.gathered is None
        )
        # Both by identity: torch's hash of a tensor is a Python function, and every gradient is looked up.
        self._shown: dict[int, nn.Parameter] = {}
        self._held_of = {id(each): held for each, held in blocks.trained.items()}
        self._grad_hooks: list[RemovableHandle] = []
        tiled = set(tiled)
        ready = [[each for each in block if each not in tiled] for block in blocks.of_block]
        self.reducer = self._reducer_of(context, ready) if averages and when_ready else None
        for parameter in (each for block in ready for each in block) if when_ready else ():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(weakly(self._on_grad_ready))
                context.undo.callback(handle.remove)
                self._grad_hooks.append(handle)

    def _reducer_of(self, context: Context, ready: list[list[nn.Parameter]]) -> GradientReducer | None:
        """Return the reducer of the blocks' gradients; None on one rank."""
        # The gradients `ready` of a block are a bucket. The others are averaged in place: as sums of all
        # micro-batches so far, which are equal on all ranks up to the last one.
        group = dist.group.WORLD
        if context.placement.world_size == 1 or group is None:
            return None
        offloaded = set(self._blocks.parameters)
        resident = [
            each
            for block in self._blocks.modules
            for each in block.parameters()
            if each.requires_grad and each not in offloaded
        ]
        # Those that autograd accumulates, in the order of backward.
        buckets = [[each for each in block if each in self._trained] for block in reversed(ready)]
        buckets += [[each] for each in resident]
        reducer = GradientReducer(group, buckets, self._on_averaged, context.device)
        for parameter in resident:
            context.undo.callback(parameter.register_post_accumulate_grad_hook(weakly(self._average)).remove)
        return reducer

    # -- ready -----------------------------------------------------------------------------------------------

    def _on_grad_ready(self, parameter: Any) -> None:
        """Offload the gradient, of replicas when its bucket is averaged; grad-ready hook."""
        if not self.is_taken:
            return
        if self.early is not None:
            self.early.require_first(parameter)
        if torch.is_grad_enabled():  # backward with `create_graph`
            with torch.no_grad():
                self._on_grad_ready(parameter)
        elif id(parameter) in self._shown:
            self._add_to_shown(parameter)
        elif parameter.grad is None:
            pass  # the user's hook has used and freed it
        elif self.reducer is not None:
            self.reducer.add(parameter)
        else:
            self._offload(parameter)

    def _on_averaged(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Offload an averaged gradient; one of a parameter that is not offloaded remains on the device."""
        parameter.grad = gradient
        del gradient
        if parameter in self._trained:
            self._offload(parameter)

    def _average(self, parameter: nn.Parameter) -> None:
        """Average the gradient of a parameter that is not offloaded."""
        assert self.reducer is not None
        with without_grad():
            self.reducer.add(parameter)

    def _offload(self, parameter: nn.Parameter) -> None:
        """Start the D2H copy of the gradient of `parameter`, which is averaged."""
        gradient = parameter.grad
        assert gradient is not None
        if self.place is not None and (place := self.place(parameter, gradient)) is not None:
            gradient = place
        # `_in_flight` has the only reference, so the gradient is freed when its copy has finished.
        parameter.grad = None
        if self.held is None:
            self.start_copy(parameter, gradient)
        else:
            self.held.append((parameter, gradient))

    def start_copy(self, parameter: nn.Parameter, source: Tensor) -> None:
        """Start the D2H copy of the gradient `source`, after enough earlier copies have finished."""
        here = local(source)
        n_bytes = here.nbytes
        self._finish(self._in_flight.make_room(n_bytes))
        (host,) = to_host_together([here])
        self._in_flight.add((parameter, source, host), n_bytes)
        self._n_started += 1
        if self._sums is not None:
            self._sums.begin(parameter)

    @torch.no_grad()
    def offload_rows(self, parameter: nn.Parameter, rows: slice, gradient: Tensor) -> None:
        """Start the D2H copy of rows of a gradient, in order; with the last it is offloaded as others are."""
        # One copy at a time: the previous rows are freed before the next ones are made.
        host = None if self._rows is None else self._rows[1]
        if host is None:
            host = host_like(local(parameter))
            mark(host, HOST)
        transfer.finish(host)
        self._rows = None
        is_last = rows.stop == len(host)
        if is_last:
            self._finish(self._in_flight.make_room(gradient.nbytes))
        torch.ops.memtune.copy_to_host_(host[rows], gradient)
        if is_last:
            self._in_flight.add((parameter, gradient, host), gradient.nbytes)
            if self._sums is not None:
                self._sums.begin(parameter)
        else:
            self._rows = gradient, host

    # -- arrived ---------------------------------------------------------------------------------------------

    def finish_moment(self, *, overlaps: bool) -> None:
        """Wait for D2H copies when a moment ends; `overlaps`: those that started in it may still run."""
        self.finish_copies(self._n_started if overlaps else 0)
        self._n_started = 0

    @torch.no_grad()
    def finish_copies(self, keep: int = 0) -> None:
        """Wait for the D2H copies of all gradients but the newest `keep`, and add them to their sums."""
        self._finish(self._in_flight.drain(keep))

    def _finish(self, copies: Iterator[tuple[nn.Parameter, Tensor, Tensor]]) -> None:
        for copy in copies:
            parameter, source, host = copy
            transfer.finish(host)
            # The last references: the device memory is free before the host adds, as the pass predicts.
            del source, copy
            if self._sums is None:
                add_gradient(self._held_of[id(parameter)], host)
            else:
                self._sums.add(parameter, host)

    def finish_averages(self) -> int:
        """Average the remaining buckets at the end of backward; return the number of missing gradients."""
        return 0 if self.reducer is None else len(self.reducer.finish())

    def abandon(self) -> None:
        """Drop gradients in D2H copies: their backward, or the step, has raised."""
        # Awaited, not forgotten: the copy engine still writes this pinned memory, which is reused next.
        for _, _, host in self._in_flight.drain():
            transfer.abandon(host)
        self._version_check.forget()
        if self.reducer is not None:
            self.reducer.abandon()
        if self._rows is not None:
            transfer.abandon(self._rows[1])
        self._rows, self._n_started = None, 0
        self._flush()

    # -- use -------------------------------------------------------------------------------------------------

    def use_in_backward(self, blocks: Iterable[int]) -> list[nn.Parameter]:
        """Notify listeners of gradients of `blocks` that are used and freed in backward; return those."""
        every = [each for block in blocks for each in self._blocks.of_block[block] if each in self._trained]
        if self._before_use is not None:
            self._before_use(every)
        used = []
        for parameter in every:
            if (gradient := self._trained[parameter].grad) is not None:
                self._before_grad_use.emit(parameter, gradient)
                used.append(parameter)
        return used

    # -- shown to the user -----------------------------------------------------------------------------------

    def show_to_user(self, lacking: int) -> None:
        """Show the offloaded gradients to the user at the end of backward.

        Args:
            lacking: Number of gradients that this rank lacks.

        Raises:
            ApplyError: This rank has skipped parameters, which other ranks average.
        """
        # A step that has used some inside backward cannot follow a change of the others, nor one
        # whose ranks average them later: their versions are noted, so that changes are found.
        self._flush()
        if lacking:
            raise refusals.not_averaged(lacking)
        for parameter, held in self._trained.items() if self.shows else ():
            if own_grad(held) is not None:
                show_grad_of(parameter, held)
                self._shown[id(parameter)] = parameter
        if not self.shows or self._version_check.are_used:
            self._version_check.record_versions()

    def hide_from_user(self) -> None:
        """Show the gradients no longer: the sums are what the user has made of them."""
        while self._shown:
            _, parameter = self._shown.popitem()
            if hide_grad_of(parameter) and self._sums is not None:
                self._sums.write_changed(parameter)

    def _flush(self) -> None:
        if self._sums is not None:
            self._sums.flush()

    def _add_to_shown(self, parameter: nn.Parameter) -> None:
        """Add a gradient to the sum that is shown: of a penalty on a weight between uses, on the host."""
        gradient = own_grad(parameter)
        set_own_grad(parameter, None)
        is_changed = hide_grad_of(parameter)
        if self._sums is None and gradient is not None:
            add_gradient(self._trained[parameter], local(gradient))
        elif self._sums is not None:
            if is_changed:
                self._sums.write_changed(parameter)
            if gradient is not None:
                self._sums.begin(parameter)
                self._sums.add(parameter, local(gradient))
                self._sums.flush()
        show_grad_of(parameter, self._trained[parameter])

    def forward_begins(self) -> None:
        """Check, before a step's first block, that the gradients so far are those of its backwards."""
        run_last(self._grad_hooks)
        self._version_check.require_unchanged()

    def step_begins(self) -> None:
        """Check that the gradients are those of the step's backwards; no gradient is noted from here on."""
        self._version_check.require_unchanged()
        self._version_check.forget()
