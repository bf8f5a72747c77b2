"""Gradients of offloaded blocks: when one is ready, and which copy of it is offloaded.

    accumulated --> averaged (replicas, a block at once) --> copied to its place (PatrickStar) --> offloaded

`offload.gradients.OffloadedGradients` owns them from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memtune import refusals
from memtune.errors import ApplyError
from memtune.offload.gradients import OffloadedGradients, Sums
from memtune.offload.parameters.block_units import OffloadedBlocks
from memtune.parallel.replicas import GradientReducer
from memtune.runtime import Context, EarlyUpdates, call_when_grad_ready, weakly, without_grad

_groups = WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]()
"""Default group → that of the blocks' gradients."""


def _group_of_blocks() -> dist.ProcessGroup:
    """Return a second group of all ranks; *collective* at the first call of a default group."""
    default = dist.distributed_c10d._get_default_group()
    if default not in _groups:
        # A recorder must not see the ops that make a group.
        with _disable_current_modes():
            made = dist.new_group()
        assert isinstance(made, dist.ProcessGroup)  # every rank is a member
        _groups[default] = made
    return _groups[default]


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
        tiled: Parameters whose gradients are offloaded by rows (`add_rows`), averaged already.

    Raises:
        ApplyError: Ranks are replicas and no component averages their gradients.

    Attributes:
        offloaded: Owns the gradients that are ready.
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
        sums: Sums | None = None,
        tiled: Collection[nn.Parameter] = (),
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
        self._blocks, self._trained, self.when_ready = blocks, blocks.trained, when_ready
        self._before_grad_use = context.events.before_grad_use
        self.early: EarlyUpdates | None = None
        self.place: Callable[[nn.Parameter, Tensor], Tensor | None] | None = None
        self.is_taken = True
        self.held: list[tuple[nn.Parameter, Tensor]] | None = None
        self.offloaded = OffloadedGradients(
            context,
            blocks.trained if when_ready else {},
            blocks.outside if when_ready else [],
            "offload: {states: {kind: optimizer_cpu}}, or no clipping",
            room_bytes=room_bytes,
            sums=sums,
            shows=when_ready,
        )
        tiled = set(tiled)
        ready = [[each for each in block if each not in tiled] for block in blocks.of_block]
        self.reducer = self._reducer_of(context, ready) if averages and when_ready else None
        if when_ready:
            trained = [each for block in ready for each in block if each.requires_grad]
            call_when_grad_ready(context, dict.fromkeys(trained, weakly(self._on_grad_ready)))

    def _reducer_of(self, context: Context, ready: list[list[nn.Parameter]]) -> GradientReducer | None:
        """Return the reducer of the blocks' gradients; None on one rank."""
        # The gradients `ready` of a block are a bucket. The others are averaged in place: as sums of all
        # micro-batches so far, which are equal on all ranks up to the last one.
        if context.placement.world_size == 1 or not dist.is_initialized():
            return None
        # DDP averages the rest in the default group. A rank that lacks a block's gradients reaches DDP's
        # bucket first, which in one group would meet the block's message, of another size: gloo then ends a
        # process, and the error that names the gradients is lost.
        group = _group_of_blocks()
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
        call_when_grad_ready(context, dict.fromkeys(resident, weakly(self._average)))
        return reducer

    def _on_grad_ready(self, parameter: Any) -> None:
        """Offload the gradient, of replicas when its bucket is averaged; grad-ready hook."""
        if not self.is_taken:
            return
        if self.early is not None:
            self.early.require_first(parameter)
        if torch.is_grad_enabled():  # backward with `create_graph`
            with torch.no_grad():
                self._on_grad_ready(parameter)
        elif self.offloaded.is_shown(parameter):
            self.offloaded.add_to_shown(parameter)
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
        """Offload the gradient of `parameter`, which is averaged."""
        gradient = parameter.grad
        assert gradient is not None
        if self.place is not None and (place := self.place(parameter, gradient)) is not None:
            gradient = place
        # The copy has the only reference, so the gradient is freed when it has finished.
        parameter.grad = None
        if self.held is None:
            self.offloaded.add(parameter, gradient)
        else:
            self.held.append((parameter, gradient))

    def finish_averages(self) -> int:
        """Average the remaining buckets at the end of backward; return the number of missing gradients."""
        return 0 if self.reducer is None else len(self.reducer.finish())

    def abandon(self) -> None:
        """Drop gradients in averages and D2H copies: their backward, or the step, has raised."""
        if self.reducer is not None:
            self.reducer.abandon()
        self.offloaded.abandon()

    def use_in_backward(self, blocks: Iterable[int]) -> list[nn.Parameter]:
        """Notify listeners of gradients of `blocks` that are used and freed in backward; return those."""
        every = [each for block in blocks for each in self._blocks.of_block[block] if each in self._trained]
        used = []
        for parameter in every:
            if (gradient := self._trained[parameter].grad) is not None:
                self._before_grad_use.emit(parameter, gradient)
                used.append(parameter)
        return used

    def show_to_user(self, lacking: int) -> None:
        """Show the offloaded gradients to the user at the end of backward.

        Args:
            lacking: Number of gradients that this rank lacks.

        Raises:
            ApplyError: This rank has skipped parameters, which other ranks average.
        """
        self.offloaded.flush()
        if lacking:
            raise refusals.not_averaged(lacking)
        self.offloaded.show()
