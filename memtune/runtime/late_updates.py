"""Updates on the host that a step leaves: they go on beside the next one's forward, and no weight is read before its own is over.

Four rules:

Rule 1. `optimizer.step()` hands over the gradients of some blocks, which are on the host, and returns. One thread updates the
        blocks in the order in which the next forward uses them, with the settings of that step.
Rule 2. Whoever reads a block's weights on the host waits for its update first (`finish`), and for no other one.
Rule 3. A block's gradients are let go when its update has been waited for. So host memory holds those of the blocks that are
        left, and never of two steps: all are used by forward before backward makes others.
Rule 4. On fake tensors the updates begin with the next micro-batch, so that a recorder sees them beside the step that they run
        beside.

Source: Sun et al. 2022, STRONGHOLD, SC 22, the concurrent optimizers; which blocks are left is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from torch import Tensor, nn

Gradients = dict[nn.Parameter, Tensor]
"""By host copy."""


class LateUpdates:
    """Of some blocks.

    Args:
        blocks: The host copies of their parameters, block by block in the order of use.
        is_fake: As Rule 4 has it.
    """

    def __init__(self, blocks: Mapping[int, Sequence[nn.Parameter]], *, is_fake: bool = False) -> None:
        self._blocks, self.is_fake = blocks, is_fake
        self._left: dict[int, Gradients] = {}
        self._under_way: dict[int, tuple[list[Future[None]], Gradients]] = {}
        self.most_left_bytes = 0

    def take(self, gradients: Gradients) -> Gradients:
        """Rule 1: take those of the blocks out of `gradients`; returns them."""
        self.finish_all()
        for block, hosts in self._blocks.items():
            mine = {host: gradients.pop(host) for host in hosts if host in gradients}
            if mine:
                self._left[block] = mine
        left = {host: gradient for mine in self._left.values() for host, gradient in mine.items()}
        self.most_left_bytes = max(self.most_left_bytes, sum(gradient.nbytes for gradient in left.values()))
        return left

    def start(self, run: Callable[[Gradients, list[Future[None]]], None]) -> None:
        """Begin what is left.

        Args:
            run: Updates the keys of its first argument from the values, on a thread; appends what is under way to the second.
        """
        while self._left:
            block = next(iter(self._left))
            gradients, under_way = self._left.pop(block), list[Future[None]]()
            run(gradients, under_way)
            if under_way:
                self._under_way[block] = under_way, gradients

    def is_over(self, block: int) -> bool:
        """Whether `finish` would not wait."""
        return all(each.done() for each in self._under_way.get(block, ((), {}))[0])

    def finish(self, block: int) -> None:
        """Rule 2; raises what went wrong in the update."""
        updates, _ = self._under_way.pop(block, ((), {}))
        for each in updates:
            each.result()

    def finish_all(self) -> None:
        """Wait for all blocks' updates; raises what went wrong in one."""
        for block in list(self._under_way):
            self.finish(block)

    @property
    def blocks(self) -> int:
        """How many blocks are left each step."""
        return len(self._blocks)
