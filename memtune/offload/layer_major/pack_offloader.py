"""Pack offload: block parameters on the host, resident pack by pack; each gradient offloaded once per step.

The pass `offload.layer_major.layer_major_pass` follows these rules op by op:

- `begin` loads a pack and may prefetch the next one; `end` frees a pack.
- A pack's gradients are summed on the device, and offloaded in its last micro-batch, each when it is ready.
- The host updates a pack once its gradients have arrived, overlapped with the next pack (just-in-time
  update), within the bound of `update_triggers.PendingUpdates`.
- Deferred updates overlap with the next step's forward; a block is loaded after its own update.
- Replicas average a gradient before it is offloaded.
- Outside of a step (evaluation, generation) each block is loaded when it is called and freed when it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memtune import refusals
from memtune.offload.core import set_own_grad
from memtune.offload.layer_major.packs import Span, in_parts
from memtune.offload.optimizer import HostOptimizer
from memtune.offload.parameters import BlockGradients, BlockUnits, BlockUpdates, OffloadedBlocks, Overlap
from memtune.parallel.replicas import average_now
from memtune.runtime import Context, UncopiedHook, before_step, transfer


class PackOffloader:
    """Loads and frees the blocks' parameters of `context`, pack by pack.

    Args:
        context: Its model; hooks are registered on its blocks and their parameters.
        optimizer: Holds the host copies, and updates them.
        averages: Ranks are replicas, and average gradients.
        deferred: Blocks with deferred updates.
        room_bytes: Bound of gradients in D2H copies at once; 0: one gradient.

    Raises:
        ApplyError: A block's parameter is used outside of it.
    """

    def __init__(
        self,
        context: Context,
        optimizer: HostOptimizer,
        *,
        averages: bool = True,
        deferred: frozenset[int] = frozenset(),
        room_bytes: int = 0,
    ) -> None:
        self._check, self._device = optimizer.check, context.device
        self._blocks = OffloadedBlocks(context, optimizer)
        self.units = BlockUnits(context, self._blocks)
        self.gradients = BlockGradients(context, self._blocks, averages=averages, room_bytes=room_bytes)
        # Gradients of packs that ran first are used and freed before the step ends, so the user cannot see
        # all.
        self.gradients.offloaded.shows = False
        self._updates = BlockUpdates(
            context, optimizer, self._blocks, self.gradients, Overlap(deferred), self.units
        )
        self._load_parts: list[list[int]] = []
        """Parts of the next pack's copies, last part first (`pop`): the block of each piece."""
        self._kept_gradients: list[tuple[nn.Parameter, Tensor]] = []
        """Gradients of the last pack that are offloaded in parts."""
        self._gradient_parts: list[range] = []
        """Their parts, last part first: indices into `_kept_gradients`."""
        self._update_next: Sequence[int] = ()
        """The blocks whose gradients are offloaded while the next pack runs."""
        self.is_stepping = False
        """True inside a step: only `begin` and `end` load and free blocks."""
        self.gradients.is_taken = False
        for index, block in enumerate(self._blocks.modules):
            self._hook_evaluation(index, block)
        before_step(context.optimizer, self._step_begins)
        self.units.free(self.units.resident)

    def _hook_evaluation(self, index: int, block: nn.Module) -> None:
        """Load and free block `index` at its own calls outside of a step; refuse a forward that records."""

        def called() -> None:
            if not self.is_stepping:
                if torch.is_grad_enabled():
                    raise refusals.outside_of_step()
                self.units.load_block(index)

        def returned() -> None:
            if not self.is_stepping:
                self.units.free((index,))

        block.register_forward_pre_hook(UncopiedHook(called))
        block.register_forward_hook(UncopiedHook(returned))

    def begin(self, pack: Span, following: Span | None, parts: int = 0) -> None:
        """Load `pack` and prefetch `following`.

        Args:
            pack: The pack that runs now.
            following: The pack that runs next.
            parts: Number of parts, one per micro-batch; 0: start all copies now.

        Raises:
            ApplyError: An earlier step raised after it had updated packs.
        """
        # With `parts`, only memory of `following` is allocated now. Its values, and the D2H copies of the
        # last pack's gradients, are split into that many parts, one per call of `next_micro_batch`. A link
        # serves copies in order: a micro-batch's boundary activation would wait for all of them.
        self._updates.early.step_goes_on()
        # Compute must not read a prefetched pack before its copies have ended.
        units = self.units
        units.prefetched.wait()
        for index in range(*pack):
            units.load_block(index)
        self._kept_gradients = kept = self.gradients.held or []
        self._gradient_parts = in_parts([each.nbytes for _, each in kept], parts)[::-1] if kept else []
        self.gradients.held = [] if parts and following is not None else None
        if following is not None:
            with units.prefetched.loading(range(*following)):
                if parts:
                    for index in range(*following):
                        units.allocate(index)
                    self._load_parts = self._cut(following, parts)
                else:
                    units.prefetch(range(*following))

    def _cut(self, following: Span, parts: int) -> list[list[int]]:
        """Split the copies of `following` into parts of about equal bytes, last part first."""
        pieces = [
            (unit, piece.host.nbytes)
            for unit in range(*following)
            for piece in self.units.unfilled.get(unit, ())
        ]
        return [
            [pieces[n][0] for n in part]
            for part in reversed(in_parts([n_bytes for _, n_bytes in pieces], parts))
        ]

    def next_micro_batch(self) -> None:
        """Start the copies of one part; called when a micro-batch's boundary activation is on the device."""
        units = self.units
        if units.unfilled:
            with transfer.prefetching(self._device):
                for unit in self._load_parts.pop() if self._load_parts else ():
                    # Never waits for a deferred update here: `begin` does, when the values are needed.
                    if unit in units.unfilled and units.deferred.is_done(unit):
                        units.fill(unit, 1)
                if not self._load_parts:
                    units.fill_finished()
        for number in self._gradient_parts.pop() if self._gradient_parts else ():
            self.gradients.offloaded.add(*self._kept_gradients[number])
            if number == len(self._kept_gradients) - 1:
                self._kept_gradients = []

    def end(self, pack: Span, *, update: bool, resident: bool = False) -> None:
        """End a pack: wait for its D2H copies, free it unless `resident`, start complete updates."""
        self.gradients.offloaded.finish_copies()
        # After the copies: they read the gradients of these blocks' memory.
        if not resident:
            self.units.free(range(*pack))
        # Copies in parts: the gradients of the pack before have arrived only now.
        self._updates.update(self._update_next)
        self._update_next = ()
        if update and self.gradients.held is not None:
            self._update_next = range(*pack)
        elif update:
            self._updates.update(range(*pack))

    def begin_step(self) -> None:
        """Begin a step, before its first forward; start the last step's deferred updates.

        Raises:
            ApplyError: An earlier step updated packs and `optimizer.step()` did not complete, for example
                because a user's hook raised.
        """
        self._updates.begin()
        self.is_stepping = True

    def end_step(self) -> None:
        """End forward and backward of all micro-batches; average gradients outside of the blocks."""
        if self.gradients.reducer is not None:
            # Once per step: their sums of all micro-batches are on the device, unlike those of the packs.
            average_now(self._blocks.outside, self.gradients.reducer.group)
        self.gradients.show_to_user(self.gradients.finish_averages())

    def abandon(self) -> None:
        """Free all blocks and forget gradients, after a step that raised."""
        self._updates.raised()
        self.gradients.abandon()
        self._kept_gradients, self._gradient_parts, self._update_next = [], [], ()
        self.gradients.held = None
        # Unlike in the plain loop the user cannot clear them: they are not shown as `grad` here.
        for held in self._blocks.trained.values():
            set_own_grad(held, None)
        self.units.free(self.units.resident)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updates.early.step_goes_on()
        self.units.step_begins()
        self.gradients.offloaded.require_unchanged()
        self.gradients.offloaded.forget()
        self._updates.early.forget()

    def check(self) -> dict[str, Any]:
        """Return facts about the blocks' parameters, for the audit; ApplyError: some are on the device."""
        if left := self.units.resident_bytes():
            raise refusals.error_of(refusals.resident_between_steps(left))
        facts = {"blocks_on_host": len(self._blocks), "loaded_bytes": self.units.loaded_bytes}
        return self._check() | facts | self._updates.facts()
