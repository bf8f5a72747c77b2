"""Parameters of the blocks on the host, on the device pack by pack; gradients leave once, updates follow at
once.

Six rules, which the pass `offload.layer_major.layer_major_pass` follows op by op:

Rule 1. `begin` brings in what of a pack is not there, then, where asked to, the pack that is used next; `end`
lets go of a pack.
        Asked to, it only takes the memory of that one, whose weights follow in even parts, one with each
        micro-batch: links serve copies in their order, and what a micro-batch starts from would wait for all
        of them.
Rule 2. A pack's gradients are summed on the device. In the last micro-batch of the pack their copies to the
host start as they
        land; the device lets go of one when the next one lands, or when the pack ends. Where weights come in
        parts, gradients leave in parts as well, one with each micro-batch of the pack that is used next, and
        are let go of when that ends.
Rule 3. A pack whose gradients are on the host when a pack ends is updated there, beside what runs next
(just-in-time update),
        once there is room for its gradients beside those that still wait (`early_updates.Waiting`).
Rule 4. With several ranks, each of which has all weights, a gradient is averaged before it leaves.
Rule 5. Outside of a step (evaluation, generation) each block comes in when it is called and goes when it
returns. Rule 6. Updates of the blocks that are `late` are left to `optimizer.step()`, which goes on without
them (`late_updates`): they
        run beside the next step's forward, and a block's is over before its weights come in (`late_blocks`).
        What is owed to the next pack is looked for in each micro-batch, and waited for when that pack begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memtune.errors import ApplyError
from memtune.offload.layer_major.packs import Span, in_parts
from memtune.offload.optimizer import HostOptimizer
from memtune.offload.parameters import DeferredBlocks
from memtune.runtime import Context, EarlyUpdates, before_step, transfer


class PackStore(DeferredBlocks):
    """Makes the blocks' parameters of `context` come and go as it is told.

    Args:
        context: Its model; hooks are put on its blocks and their parameters.
        optimizer: Holds the host copies, and updates them.
        averages: Ranks that have all weights average gradients.
        late: Blocks whose updates go on beside the next step's forward.
        room_bytes: Of gradients on their way at once; 0: one.

    Raises:
        ApplyError: A block's parameter is used outside of it, or nothing outside of the blocks is trained.
    """

    def __init__(
        self,
        context: Context,
        optimizer: HostOptimizer,
        *,
        averages: bool = True,
        late: frozenset[int] = frozenset(),
        room_bytes: int = 0,
    ) -> None:
        super().__init__(context, optimizer, averages=averages, room_bytes=room_bytes)
        self._late_blocks = late
        self._parts: list[list[int]] = []
        """Of what is to come in, the last part first: of each piece the block."""
        self._staying: list[tuple[nn.Parameter, Tensor]] = []
        """Gradients of the last pack, which leave in parts."""
        self._going: list[range] = []
        """Which of them, the last part first."""
        self._in_parts, self._gone = False, list[int]()
        """Whether this pack's gradients stay for the next one; the blocks whose gradients leave meanwhile."""
        self._leave(context, optimizer, {block: self._blocks[block] for block in late})
        self._updated = EarlyUpdates(context, "block")
        self.is_stepping = False
        """Inside a step: packs are brought in and let go by `begin` and `end` alone."""
        self.is_last = False
        """In the last micro-batch of a pack: gradients leave as they land."""
        for index, block in enumerate(self._modules):
            self._call_alone(index, block)
            self._watch_block(context, index)
        before_step(context.optimizer, self._step_begins)
        self._release(range(len(self._units)))

    def _call_alone(self, index: int, block: nn.Module) -> None:
        """Rule 5."""

        def called(module: nn.Module, args: Any) -> None:
            if not self.is_stepping:
                if torch.is_grad_enabled():
                    raise ApplyError(
                        "This config runs each block over all micro-batches before the next one.",
                        evidence="Only Tuned.step has them all.",
                        fix="tuned.step(batches)",
                        code="MT311",
                    )
                self._fetch_block(index)

        def returned(module: nn.Module, args: Any, output: Any) -> None:
            if not self.is_stepping:
                self._release(self._of_block[index])

        block.register_forward_pre_hook(called)
        block.register_forward_hook(returned)

    def begin(self, pack: Span, ahead: Span | None, parts: int = 0) -> None:
        """Rule 1.

        Args:
            pack: What is used now.
            ahead: What is used next.
            parts: In which that comes in, and the last pack's gradients leave, one with each `go_on`; 0: now.

        Raises:
            ApplyError: A step before has ended in an error after it had updated packs.
        """
        self._updated.step_goes_on()
        transfer.wait_prefetched(self._device)
        for index in range(*pack):
            self._fetch_block(index)
        self._in_parts = parts > 0 and ahead is not None
        self._going = (
            in_parts([source.nbytes for _, source in self._staying], parts)[::-1] if self._staying else []
        )
        if ahead is not None:
            with transfer.prefetching(self._device):
                if parts:
                    self._promise(range(*ahead))
                    self._parts = self._cut(ahead, parts)
                else:
                    self._bring_ahead(range(*ahead))

    def _cut(self, ahead: Span, parts: int) -> list[list[int]]:
        pieces = [(unit, piece.host.nbytes) for unit in range(*ahead) for piece in self._owed.get(unit, ())]
        return [
            [pieces[n][0] for n in part]
            for part in reversed(in_parts([n_bytes for _, n_bytes in pieces], parts))
        ]

    def go_on(self) -> None:
        """Rules 1 and 6: what a micro-batch of a pack starts from is there."""
        if self._owed:
            with transfer.prefetching(self._device):
                for unit in self._parts.pop() if self._parts else ():
                    if unit in self._owed and self._late.is_over(unit):
                        self._pay(unit, 1)
                if not self._parts:
                    self.pay_what_is_over()
        for number in self._going.pop() if self._going else ():
            self._leaves(*self._staying[number])
            if number == len(self._staying) - 1:
                self._staying = []

    def end(self, pack: Span, *, update: bool, stays: bool = False) -> None:
        """Rules 1 to 3 and 6; what `stays` is used next."""
        self._arrive()
        if not stays:
            self._release(range(*pack))
        self._update(self._gone)
        self._gone = []
        if update and self._in_parts:
            self._gone = list(range(*pack))
        elif update:
            self._update(range(*pack))

    def _update(self, blocks: Sequence[int]) -> None:
        """Rules 3 and 6."""
        self._show(each for index in blocks for each in self._blocks[index])
        ready = [index for index in blocks if index not in self._late_blocks]
        self._updated.add(ready)
        if ready:
            self._updates.update([each for index in ready for each in self._blocks[index]], at_once=False)

    def fetch_one(self, index: int) -> None:
        """Bring in one block, outside of any pack."""
        self._fetch_block(index)

    def release_one(self, index: int) -> None:
        """Let go of one block, outside of any pack."""
        self._release(self._of_block[index])

    def step_starts(self) -> None:
        """Forward of the first micro-batch comes next.

        Raises:
            ApplyError: A step before has updated packs, and `optimizer.step()` did not end it: a hook of the
                user's has raised.
        """
        self._updated.step_begins()
        self.is_stepping = True
        self.start_late()

    def step_ends(self) -> None:
        """Forward and backward of all micro-batches are over; what is in no block is averaged."""
        for parameter in self._outside:
            if parameter.grad is not None:
                self._average(parameter)
        self._note_versions()

    def abandon(self) -> None:
        """A step ended in an error: nothing stays on the device."""
        self._updated.raised()
        self._forget_landed()
        self._staying, self._going, self._gone = [], [], []
        for held in self._trained.values():  # arrived, and not used: no step will
            held.grad = None
        self._release(range(len(self._units)))

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._updated.step_goes_on()
        super()._step_begins(optimizer, args, kwargs)
        self._updated.forget()

    def _landed(self, parameter: Tensor) -> None:
        if not self.is_last:
            return
        if not self._in_parts:
            super()._landed(parameter)
            return
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        self._staying.append((parameter, parameter.grad))
        parameter.grad = None

    def check(self) -> dict[str, Any]:
        """Where the blocks' parameters are.

        Raises:
            ApplyError: Some are on the device between two steps.
        """
        if left := self._left_bytes():
            raise ApplyError(
                f"{left} bytes of the blocks' parameters are on the device between two steps.", code="MT309"
            )
        facts = self._optimizer.check() | {
            "blocks_on_host": len(self._blocks),
            "loaded_bytes": self.loaded_bytes,
        }
        return facts | (self._late_facts() if self._late_blocks else {})
