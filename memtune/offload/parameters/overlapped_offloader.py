"""Parameter offload with overlapped updates: D2H of gradients and host updates run while other blocks
compute.

Extends `offload.parameters.offloader`; the pass `offload.parameters.overlap_pass` predicts it.

1. Gradients up to a block's bytes may be in D2H copies at once, in grad-ready order. Those of a block have
  all arrived when
   the moment after its own ends, or backward does.
2. A block is then updated on a thread that overlaps with later computation; its gradients wait within the
  bound of
   `update_triggers.Waiting`, so the previous block's update has ended. `optimizer.step()` waits for the last
   updates.
3. Updates of deferred blocks start in `optimizer.step()`, which does not wait for them
   (`offload.optimizer.deferred_updates`); the next forward loads a block after its own update only.
4. Between two steps the host holds gradients of the deferred blocks, and no other gradient.

Source: Sun et al. 2022, STRONGHOLD, SC 22.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memtune.offload.core import Piece, room_bytes
from memtune.offload.optimizer import DeferredUpdates, HostOptimizer
from memtune.offload.parameters.offloader import HostParameters, ParameterOffloader
from memtune.program import Residency
from memtune.runtime import Context, local, transfer


# Blocks that come in while updates of some of them, which the last step has left (`late_updates`), are still
# under way.
class DeferredBlocks(HostParameters):
    """Host parameters with a block per unit, of which some are updated deferred.

    A block is prefetched in two parts while its update runs: its memory is allocated at once, its values are
    copied when the
    update has ended. `_leave` is called before any load.
    """

    _late: DeferredUpdates
    _owed: dict[int, list[Piece]]
    """By block: what has memory, and no values yet."""

    def _leave(
        self, context: Context, updates: HostOptimizer, blocks: Mapping[int, Sequence[nn.Parameter]]
    ) -> None:
        """Leave the updates of `blocks` to the next step; none: nothing is ever late."""
        self._updates, self._owed = updates, {}
        self._late = (
            updates.leave_late(context, {block: list(each) for block, each in blocks.items()})
            if blocks
            else DeferredUpdates({})
        )

    def start_late(self) -> None:
        """Begin what the last step has left, where it did not begin by itself."""
        self._updates.start_late()

    def pay_what_is_over(self) -> None:
        """Rule 2, without waiting."""
        for unit in [each for each in self._owed if self._late.is_over(each)]:
            self._pay(unit)

    def _bring_ahead(self, units: Iterable[int]) -> None:
        """Rule 2."""
        self.pay_what_is_over()
        for unit in units:
            if unit in self._there or self._late.is_over(unit):
                self._fetch(unit)
            else:
                self._promise([unit])

    def _promise(self, units: Iterable[int]) -> None:
        for unit in units:
            if unit in self._there:
                continue
            self._there.add(unit)
            self._owed[unit] = list(self._units[unit])
            for piece in self._owed[unit]:
                piece.take()

    def _fetch(self, index: int) -> None:
        """Load the block after waiting for its own update."""
        if index in self._owed:
            self._pay(index)
            return
        if index not in self._there:
            self._late.finish(index)
        super()._fetch(index)

    @torch.no_grad()
    def _pay(self, unit: int, pieces: int | None = None) -> None:
        """Values of the first `pieces` of what is owed to `unit`; none given: all."""
        self._late.finish(unit)
        owed = self._owed[unit]
        count = len(owed) if pieces is None else pieces
        self._bring_pieces(owed[:count])
        del owed[:count]
        if not owed:
            del self._owed[unit]

    def _release(self, units: Any) -> None:
        """Free `units`, including those without values."""
        units = list(units)
        for unit in units:
            self._owed.pop(unit, None)
        super()._release(units)

    def _into_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self.start_late()
        self._late.finish_all()
        super()._into_state_dict(module, state, prefix, metadata)

    def _late_facts(self) -> dict[str, Any]:
        """For the audit: how many blocks are late, and how much was left to the next step at most."""
        return {"late_blocks": self._late.blocks, "late_bytes": self._late.most_left_bytes}


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
        late: frozenset[int],
        *,
        at_end: bool = False,
    ) -> None:
        self._late_blocks, self._in_step = late, at_end
        self._fresh = 0  # gradients that have landed in this moment
        self._leaving: int | None = None  # the block whose last gradients are on their way
        blocks = [list(context.model.get_submodule(name).parameters()) for name in context.blocks]
        self._leave(context, optimizer, {block: blocks[block] for block in late})
        super().__init__(context, residency, optimizer, room_bytes=_largest_bytes(context, blocks))

    # -- gradients -------------------------------------------------------------------------------------------

    def _landed(self, parameter: Any) -> None:
        self._fresh += 1
        super()._landed(parameter)

    def _arrive_before(self, moment: int) -> None:
        """Wait for D2H copies of earlier moments; this moment's own may still run."""
        self._arrive(keep=self._fresh if moment < self._end else 0)
        self._fresh = 0

    def _update_after(self, moment: int, block: int | None) -> None:
        """Update the block whose gradients have arrived, one moment after they were all ready."""
        arrived, self._leaving = [self._leaving], block
        if moment == self._end:
            arrived, self._leaving = [*arrived, block], None
        for each in arrived:
            if each is None:
                continue
            self._show(self._blocks[each])
            if each not in self._late_blocks and not self._in_step:
                self._updated.add([each])
                self._updates.update(self._blocks[each], at_once=False)

    def _backward_raised(self) -> None:
        self._fresh, self._leaving = 0, None
        super()._backward_raised()

    # -- weights ---------------------------------------------------------------------------------------------

    def sync(self, last: bool) -> Any:
        """Return the context of a micro-batch, in which deferred updates of the last step run."""
        self.start_late()
        return super().sync(last)

    def _returned(self, index: int, args: Any, output: Any) -> None:
        super()._returned(index, args, output)
        if index + 1 in self._owed:  # the device has work until it is there
            with transfer.prefetching(self._device):
                self._pay(index + 1)

    def check(self) -> dict[str, Any]:
        """Return facts about the blocks' parameters, and the largest bytes of deferred gradients."""
        return super().check() | self._late_facts()


def _largest_bytes(context: Context, blocks: list[list[nn.Parameter]]) -> int:
    """Return the largest bytes of a block's trained parameters, or of this rank's rows of them."""
    held = [[context.placement.optimizer_param(parameter) for parameter in block] for block in blocks]
    sizes = [local(each).nbytes for block in held for each in block if each.requires_grad]
    return room_bytes(
        sizes, [index for index, block in enumerate(held) for each in block if each.requires_grad]
    )
