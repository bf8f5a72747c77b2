"""Parameters of the blocks on the host, on the device only while a residency says so; gradients leave as they land.

What comes and goes is a *unit*: a block, or a chunk that holds parameters of one or several blocks side by side.

Seven rules, which the pass `passes.stream` follows op by op:

Rule 1. A moment begins when a block is called, or when backward has the gradient of what a block returned; the last one of a step
        when backward ends. A block's use ends where the next moment begins.
Rule 2. When a moment begins, the gradient on its way is finished, then units are let go, then others come in, then the block of
        the moment before is updated. So its update runs beside the device's work on the next block.
Rule 3. A unit's memory is given back and taken anew in place (the storage is resized, as FSDP2 does), so what autograd saved
        of a weight finds the values that it saved: they do not change within a step.
Rule 4. A gradient's copy to the host starts when autograd has put it in place; the device lets go of it when the next one lands,
        or when the next moment begins. The host adds up micro-batches. Among replicas it is averaged before it leaves, in each
        micro-batch: no rank ever has the sum on its device.
Rule 5. Updates in backward need to know that the micro-batch is the last one: `Tuned.step` or `Tuned.micro_batch` says so. In
        any other loop all blocks are updated in `optimizer.step()`.
Rule 6. What is not there when it is asked for comes in late: a loop that uses blocks in another order is slower, not wrong.
Rule 7. What was on its way when a backward raised is forgotten, and training goes on; what had landed is the user's to clear
        (`zero_grad`), as in any loop. Where that backward had updated blocks the step cannot be taken back, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memtune.chunks import Chunks
from memtune.errors import ApplyError
from memtune.pages import Pages
from memtune.residency import Residency, Units, order_of_use
from memtune.runtime import transfer
from memtune.runtime.backward_end import BackwardEnd, EarlyUpdated
from memtune.runtime.context import Context
from memtune.runtime.hooks import weakly
from memtune.runtime.host_parameters import HostCopies, HostParameters
from memtune.runtime.own_step import before_step


class ParameterStore(HostParameters):
    """Makes the blocks' parameters of `context` come and go.

    Args:
        context: Its model; hooks are put on its blocks and their parameters.
        residency: Which unit is there when.
        optimizer: Holds the host copies, and updates them.
        chunks: Where the blocks' parameters lie; none: each block is a unit.
        early: Blocks are updated in backward, natively.
        only: As in `HostParameters`.
        landing: As there.
        copy: As there.
        members: As there.
        room_bytes: As there.

    Raises:
        ApplyError: A block's parameter is used outside of it, or gradients leave and nothing outside of the blocks is trained.
    """

    def __init__(
        self,
        context: Context,
        residency: Residency,
        optimizer: HostCopies,
        *,
        chunks: Chunks | Pages | None = None,
        early: bool = True,
        only: Container[int] | None = None,
        landing: bool = True,
        copy: Callable[[Tensor, Tensor], None] | None = None,
        members: list[list[nn.Parameter]] | None = None,
        room_bytes: int = 0,
    ) -> None:
        averages = context.averages_blocks and context.runner is not None  # DDP's, which has left them out
        super().__init__(
            context, optimizer, chunks, only=only, landing=landing, copy=copy, members=members, averages=averages,
            room_bytes=room_bytes,
        )  # fmt: skip
        if landing and members is None and context.ranks > 1 and self._gathered is None and not averages:
            raise ApplyError(
                "Gradients that leave as they land would not be averaged among ranks.",
                fix="sharding: {states: {kind: fsdp}}", code="MT364",
            )  # fmt: skip
        self._residency = residency
        self._moment = self._end = len(residency.drops) - 1
        self._uses = order_of_use(len(self._blocks), gathered=self._gathered is not None)
        self._is_last = False
        self._at_end = BackwardEnd(self._backward_ends, self._backward_raised)
        self._updated = EarlyUpdated(context, "block")
        for index in range(len(self._modules)):
            self._watch(context, index)
        for parameter in self._outside if landing else ():
            context.undo.callback(parameter.register_post_accumulate_grad_hook(weakly(self._outside_landed)).remove)
        self._outer = context.sync
        if early:
            context.sync = self.sync
        before_step(context.optimizer, self._step_begins)
        context.reloaded.append(self._at_end.settle)
        self._release(list(self._there))

    def _watch(self, context: Context, index: int) -> None:
        block, first = self._modules[index], self._gathered is not None  # before FSDP2's own hooks
        block.register_forward_pre_hook(
            lambda module, args: self._begin(index) if torch.is_grad_enabled() else self._fetch_block(index), prepend=first
        )
        block.register_forward_hook(lambda module, args, output: self._returned(index, args, output), prepend=first)
        self._watch_block(context, index)

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """The context of a micro-batch: after the last one's backward each block is updated (Rule 5).

        Raises:
            ApplyError: Rule 7.
        """
        self._at_end.settle()
        self._updated.step_begins()
        self._is_last = last
        try:
            with nullcontext() if self._outer is None else self._outer(last):
                yield
        finally:
            self._is_last = False

    # -- moments ---------------------------------------------------------------------------------------------------------

    def _returned(self, index: int, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._release(self._of_block[index])
            return
        moment = self._end - 1 - index
        given = {id(each) for each in tree_leaves(args)}  # passed on as it is, its gradient says that the block before is next
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in given:
                tensor.register_hook(lambda _: self._backward(moment))

    def _backward(self, moment: int) -> None:
        self._at_end.expect()
        self._begin(moment)

    def _outside_landed(self, parameter: Tensor) -> None:
        """A backward may run no block (a penalty on the head): its end is the last moment all the same."""
        self._at_end.expect()

    def _backward_ends(self) -> None:
        self._begin(self._end)
        self._note_versions()

    def _begin(self, moment: int) -> None:
        """Rules 1 and 2."""
        self._at_end.settle()
        if moment == 0 and not self._at_end.is_near:
            self._watched.require_unchanged()
        if moment == self._moment:
            self._fetch_used(moment)  # the forward in which it began may have raised, and all have been let go since
            return
        before, self._moment = self._moment, moment
        self._arrive_before(moment)
        self._release(self._there if before + 1 != moment else self._residency.drops[moment])
        transfer.caught_up(self._device)
        self._fetch_used(moment)  # the first that comes in, or Rule 6
        with transfer.ahead(self._device):
            self._bring_ahead(self._residency.loads[moment])
        is_used = self._is_last and len(self._blocks) <= before < self._end
        self._update_after(moment, self._end - 1 - before if is_used else None)

    def _fetch_used(self, moment: int) -> None:
        if moment < self._end and (used := self._uses[moment]) >= 0:
            self._fetch_block(used)

    def _arrive_before(self, moment: int) -> None:
        self._arrive()

    def _bring_ahead(self, units: Units) -> None:
        self._fetch_units(units)

    def _update_after(self, moment: int, block: int | None) -> None:
        """`block`: whose gradients have all landed in the moment before, None for no block's last ones."""
        if block is not None:
            self._show(self._blocks[block])
            self._updated.add([block])
            self._optimizer.update(self._blocks[block])

    # -- a backward that raised ------------------------------------------------------------------------------------------

    def _backward_raised(self) -> None:
        """Rule 7."""
        self._updated.raised()
        self._forget_landed()

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._at_end.settle()
        self._updated.step_goes_on()
        super()._step_begins(optimizer, args, kwargs)
        self._updated.forget()

    # -- proof -----------------------------------------------------------------------------------------------------------

    def check(self) -> dict[str, Any]:
        """Where the blocks' parameters are.

        Raises:
            ApplyError: Some are on the device between two steps.
        """
        left = self._left_bytes()
        if left and self._moment == self._end:
            raise ApplyError(f"{left} bytes of the blocks' parameters are on the device between two steps.", code="MT309")
        facts = self._optimizer.check()
        return facts | {"blocks_on_host": self.blocks_on_host, "loaded_bytes": self.loaded_bytes}
