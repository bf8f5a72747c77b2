"""Parameter offload with overlap: D2H of gradients and host updates run while other blocks compute.

Extends `offload.parameters.offloader`; the pass `offload.parameters.moments_pass` predicts it.

- Gradients up to a block's bytes may be in D2H copies at once, in grad-ready order. Those of a block have all
  arrived when the moment after its own ends, or backward does.
- A block is then updated on a thread that overlaps with later computation; its gradients wait within the
  bound of `PendingUpdates`, so the previous block's update has ended. `optimizer.step()` waits for the last
  updates.
- Updates of deferred blocks start in `optimizer.step()`, which does not wait for them
  (`offload.optimizer.deferred_updates`); the next forward loads a block after its own update only.
- Between two steps the host holds gradients of the deferred blocks, and no other gradient.

States of a deferred block in the next forward:

    freed --_allocate--> allocated, values missing --_fill, when its update has ended--> resident

Source: Sun et al. 2022, STRONGHOLD, SC 22.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memtune.offload.core import Piece, allocate_together, room_bytes
from memtune.offload.optimizer import DeferredUpdates, HostOptimizer
from memtune.offload.parameters.offloader import HostParameters, ParameterOffloader
from memtune.program import Residency
from memtune.runtime import Context, after_step, local


class DeferredBlocks(HostParameters):
    """Host parameters with a block per unit, of which some are updated deferred.

    A block is prefetched in two parts while its update runs: its memory is allocated at once, its values are
    copied when the update has ended. Until then its parameters' values are in flight. `_defer` is called
    before any load.
    """

    _deferred: DeferredUpdates
    _unfilled: dict[int, list[Piece]]
    """By block: pieces that are allocated and have no values yet."""

    def _defer(
        self, context: Context, updates: HostOptimizer, blocks: Mapping[int, Sequence[nn.Parameter]]
    ) -> None:
        """Defer the updates of `blocks` to the next step; with none, no update is deferred.

        Called before `HostParameters.__init__`, whose loads use these attributes.
        """
        self._updates, self._unfilled = updates, {}
        self._deferred = (
            updates.defer(context, {block: list(each) for block, each in blocks.items()})
            if blocks
            else DeferredUpdates({})
        )
        if blocks and not self._deferred.is_fake:
            after_step(context.optimizer, lambda *_: self._expect_updates())

    def start_deferred(self) -> None:
        """Start the updates that the last step deferred, unless they are running already."""
        self._updates.start_deferred()

    def fill_finished(self) -> None:
        """Load the values of allocated blocks whose updates have ended, without waiting."""
        for unit in [each for each in self._unfilled if self._deferred.is_done(each)]:
            self._fill(unit)

    def _prefetch(self, units: Iterable[int]) -> None:
        """Load the blocks whose updates have ended on the copy stream; only allocate the others."""
        self.fill_finished()
        for unit in units:
            if unit in self._resident or self._deferred.is_done(unit):
                self._load_unit(unit)
            else:
                # Waiting here would stall the compute of the current block. The memory is taken now, so that
                # the peak does not depend on the speed of updates.
                self._allocate([unit])

    def _allocate(self, units: Iterable[int]) -> None:
        """Allocate units whose values are loaded by `_fill` later."""
        for unit in units:
            if unit in self._resident:
                continue
            # Resident though without values: no later load may allocate it again.
            self._resident.add(unit)
            self._unfilled[unit] = list(self._units[unit])
            allocate_together(self._unfilled[unit])

    def _load_unit(self, index: int) -> None:
        """Load the block after waiting for its own update."""
        if index in self._unfilled:
            self._fill(index)
            return
        if index not in self._resident:
            self._deferred.finish(index)
        super()._load_unit(index)

    @torch.no_grad()
    def _fill(self, unit: int, pieces: int | None = None) -> None:
        """Load the values of the first `pieces` pieces of `unit`; None: of all."""
        # Values first exist on the host when the update has ended.
        self._deferred.finish(unit)
        unfilled = self._unfilled[unit]
        count = len(unfilled) if pieces is None else pieces
        self._load_pieces(unfilled[:count])
        del unfilled[:count]
        if not unfilled:
            del self._unfilled[unit]

    def _free_units(self, units: Any) -> None:
        """Free `units`, including those without values."""
        units = list(units)  # an iterator would be empty for `super`
        for unit in units:
            self._unfilled.pop(unit, None)
        super()._free_units(units)

    def _expect_updates(self) -> None:
        """Have accesses to deferred blocks' parameters wait for their updates; post-step hook."""
        for block in self._deferred.unfinished():
            for piece in self._units[block]:
                for each in piece.of:
                    each.expect_values(self._finish_updates)

    def _finish_updates(self) -> None:
        """Finish all deferred updates, because the user reads or writes a parameter."""
        self.start_deferred()
        self._deferred.finish_all()
        for each in self._offloaded():
            each.settle()

    def _deferred_facts(self) -> dict[str, Any]:
        """Return audit facts: number of deferred blocks, and the largest bytes of their gradients."""
        return {"deferred_blocks": self._deferred.blocks, "deferred_bytes": self._deferred.max_deferred_bytes}


class OverlappedOffloader(DeferredBlocks, ParameterOffloader):
    """Offloads the blocks' parameters of `context`, with overlapped and deferred updates.

    Args:
        context: Its model; hooks are registered on its blocks and their parameters.
        residency: Blocks to free and load at each moment.
        optimizer: Holds the host copies, and updates them.
        deferred: Blocks whose updates overlap with the next step's forward.
        at_end: All blocks are updated in `optimizer.step()`, so that backward has the host's cores.
    """

    def __init__(
        self,
        context: Context,
        residency: Residency,
        optimizer: HostOptimizer,
        deferred: frozenset[int],
        *,
        at_end: bool = False,
    ) -> None:
        self._deferred_blocks, self._in_step = deferred, at_end
        self._n_copies = 0  # D2H copies that started in this moment
        self._copying_block: int | None = None  # its gradients are ready, the last ones still in D2H copies
        blocks = [list(context.model.get_submodule(name).parameters()) for name in context.blocks]
        # Before `super`: its constructor loads and frees units, which reads these attributes.
        self._defer(context, optimizer, {block: blocks[block] for block in deferred})
        super().__init__(context, residency, optimizer, room_bytes=_largest_bytes(context, blocks))

    # -- gradients -------------------------------------------------------------------------------------------

    def _start_copy(self, parameter: nn.Parameter, source: Tensor) -> None:
        self._n_copies += 1
        super()._start_copy(parameter, source)

    def _finish_copies_before(self, moment: int) -> None:
        """Wait for D2H copies of earlier moments; those that started in the ending moment may still run."""
        # Copies that started in the moment that ends may still run, within the bound of a block's bytes.
        self._finish_copies(keep=self._n_copies if moment < self._end else 0)
        self._n_copies = 0

    def _update_after(self, moment: int, block: int | None) -> None:
        """Update the block whose gradients have arrived, one moment after they were all ready."""
        # One moment later than without overlap: by then the block's last copies have ended too.
        arrived, self._copying_block = [self._copying_block], block
        if moment == self._end:
            arrived, self._copying_block = [*arrived, block], None
        for each in arrived:
            if each is None:
                continue
            self._emit_grad_use(self._blocks[each])
            if each not in self._deferred_blocks and not self._in_step:
                self._early_updates.add([each], self._with_gradients(each))
                self._updates.update(self._blocks[each], at_once=False)

    def _backward_raised(self) -> None:
        self._n_copies, self._copying_block = 0, None
        super()._backward_raised()

    # -- weights ---------------------------------------------------------------------------------------------

    def sync(self, last: bool) -> Any:
        """Return the context of a micro-batch, in which deferred updates of the last step run."""
        self.start_deferred()
        return super().sync(last)

    def _after_forward(self, index: int, args: Any, output: Any) -> None:
        super()._after_forward(index, args, output)
        if index + 1 in self._unfilled:
            # The block's kernels are queued, so the host may wait for the next block's update while they run.
            with self._prefetching([index + 1]):
                self._fill(index + 1)

    def check(self) -> dict[str, Any]:
        """Return facts about the blocks' parameters, and the largest bytes of deferred gradients."""
        return super().check() | self._deferred_facts()


def _largest_bytes(context: Context, blocks: list[list[nn.Parameter]]) -> int:
    """Return the largest bytes of a block's trained parameters, or of this rank's rows of them."""
    params = [[context.placement.optimizer_param(parameter) for parameter in block] for block in blocks]
    sizes = [local(each).nbytes for block in params for each in block if each.requires_grad]
    return room_bytes(
        sizes, [index for index, block in enumerate(params) for each in block if each.requires_grad]
    )
