"""A store whose gradients leave, and whose blocks are updated, beside other blocks' compute, some beside the next step's forward.

Five rules beyond those of `runtime.store`, which the pass `passes.beside` follows:

Rule 1. Gradients of a block's bytes may be on their way to the host at once, in the order in which they landed. Those of a block
        have all arrived when the moment after its own ends, or backward does.
Rule 2. A block is updated then, on a thread, beside what comes next; its gradients wait for it as `early_updates.Waiting` has
        it, so the update of the block before has ended. `optimizer.step()` waits for the last ones.
Rule 3. The updates of the blocks that are `late` are left to `optimizer.step()`, which goes on without them (`late_updates`).
Rule 4. A block whose update is under way comes in as `late_blocks` has it: what is owed is looked for when a moment begins, and
        waited for when the block before has been issued.
Rule 5. Between two steps gradients of the late blocks are in host memory, and nothing else that the steps before have made.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from memtune.early_updates import room_bytes
from memtune.residency import Residency
from memtune.runtime import transfer
from memtune.runtime.context import Context
from memtune.runtime.held_parameter import held_in_place
from memtune.runtime.host_optimizer import HostOptimizer
from memtune.runtime.late_blocks import LateBlocks
from memtune.runtime.store import ParameterStore
from memtune.runtime.tree import local


class BesideStore(LateBlocks, ParameterStore):
    """Makes the blocks' parameters of `context` come and go.

    Args:
        context: Its model; hooks are put on its blocks and their parameters.
        residency: Which block is there when.
        optimizer: Holds the host copies, and updates them.
        late: Blocks whose updates go on beside the next step's forward.
        at_end: All blocks are updated in `optimizer.step()`, and the host's cores are left to backward.
    """

    def __init__(
        self, context: Context, residency: Residency, optimizer: HostOptimizer, late: frozenset[int], *, at_end: bool = False
    ) -> None:
        self._late_blocks, self._in_step = late, at_end
        self._fresh = 0  # gradients that have landed in this moment
        self._leaving: int | None = None  # the block whose last gradients are on their way
        blocks = [list(context.model.get_submodule(name).parameters()) for name in context.blocks]
        self._leave(context, optimizer, {block: blocks[block] for block in late})
        super().__init__(context, residency, optimizer, room_bytes=_largest_bytes(context, blocks))

    # -- gradients -------------------------------------------------------------------------------------------------------

    def _landed(self, parameter: Any) -> None:
        self._fresh += 1
        super()._landed(parameter)

    def _arrive_before(self, moment: int) -> None:
        """Rule 1."""
        self._arrive(keep=self._fresh if moment < self._end else 0)
        self._fresh = 0

    def _update_after(self, moment: int, block: int | None) -> None:
        """Rules 2 and 3."""
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

    # -- weights ---------------------------------------------------------------------------------------------------------

    def sync(self, last: bool) -> Any:
        """The context of a micro-batch, in which what the last step left is under way."""
        self.start_late()
        return super().sync(last)

    def _returned(self, index: int, args: Any, output: Any) -> None:
        super()._returned(index, args, output)
        if index + 1 in self._owed:  # the device has work until it is there
            with transfer.ahead(self._device):
                self._pay(index + 1)

    def check(self) -> dict[str, Any]:
        """Where the blocks' parameters are, and how much was left to the next step at most."""
        return super().check() | self._late_facts()


def _largest_bytes(context: Context, blocks: list[list[nn.Parameter]]) -> int:
    """Of the trained parameters of a block, or this rank's rows of them."""
    held = [[held_in_place(context, parameter) for parameter in block] for block in blocks]
    sizes = [local(each).nbytes for block in held for each in block if each.requires_grad]
    return room_bytes(sizes, [index for index, block in enumerate(held) for each in block if each.requires_grad])
