"""Deferred host updates: a step's updates of some blocks run during the next step's forward; exact.

States of a block:

    up to date --take--> deferred --start--> running on the thread --finish--> up to date

`optimizer.step()` passes the host gradients of the deferred blocks and returns. One thread updates the blocks
in the order
in which the next forward uses them, with the settings of that step. A read of a block's host weights waits
for that
block's update only (`finish`), after which its gradients are freed. Host memory holds one step's deferred
gradients at
most: forward uses them all before backward produces others. On fake tensors the updates begin with the next
micro-batch,
so that a recorder sees them in the step that they overlap with.

Source: Sun et al. 2022, STRONGHOLD, SC 22, the concurrent optimizers; the choice of the deferred blocks is
memtune's
(`offload.core.deferred_updates_plan`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

Gradients = dict[nn.Parameter, Tensor]
"""Gradients by the parameter's host copy."""


class DeferredUpdates:
    """Deferred updates of some blocks.

    Args:
        blocks: The host copies of their parameters, block by block in the order of use.
        is_fake: The tensors are fake; updates begin with the next micro-batch.
    """

    def __init__(self, blocks: Mapping[int, Sequence[nn.Parameter]], *, is_fake: bool = False) -> None:
        self._blocks, self.is_fake = blocks, is_fake
        self._left: dict[int, Gradients] = {}
        self._under_way: dict[int, tuple[list[Future[None]], Gradients]] = {}
        self.most_left_bytes = 0

    def take(self, gradients: Gradients) -> Gradients:
        """Move the gradients of the blocks out of `gradients` and return them; their updates are deferred."""
        self.finish_all()
        for block, hosts in self._blocks.items():
            mine = {host: gradients.pop(host) for host in hosts if host in gradients}
            if mine:
                self._left[block] = mine
        left = {host: gradient for mine in self._left.values() for host, gradient in mine.items()}
        self.most_left_bytes = max(self.most_left_bytes, sum(gradient.nbytes for gradient in left.values()))
        return left

    def start(self, run: Callable[[Gradients, list[Future[None]]], None]) -> None:
        """Start all deferred updates.

        Args:
            run: Updates the keys of its first argument from the values on a thread; appends the futures to
                the second.
        """
        while self._left:
            block = next(iter(self._left))
            gradients, under_way = self._left.pop(block), list[Future[None]]()
            run(gradients, under_way)
            if under_way:
                self._under_way[block] = under_way, gradients

    def is_over(self, block: int) -> bool:
        """Return True if `finish` would not wait."""
        return all(each.done() for each in self._under_way.get(block, ((), {}))[0])

    def finish(self, block: int) -> None:
        """Wait for the update of `block`; raise the error of a failed one."""
        updates, _ = self._under_way.pop(block, ((), {}))
        for each in updates:
            each.result()

    def finish_all(self) -> None:
        """Wait for all blocks' updates; raise the error of a failed one."""
        for block in list(self._under_way):
            self.finish(block)

    @property
    def blocks(self) -> int:
        """Number of blocks deferred in each step."""
        return len(self._blocks)


# An optimizer's `state` whose reader waits for the updates under way: what it shows is the last step's, as in
# a plain run.
class SyncedState(defaultdict[Any, Any]):
    """An `optimizer.state` whose reads wait for the updates that are running.

    Args:
        held: The state so far.
        settle: Waits until all of it is that of the last step.
    """

    def __init__(self, held: dict[Any, Any], settle: Callable[[], None]) -> None:
        super().__init__(dict, held)
        self._settle, self._as_it_is = settle, False

    def settle(self) -> None:
        """Wait for the updates, unless the read is the runtime's own."""
        if not self._as_it_is:
            with self.as_it_is():
                self._settle()

    @contextmanager
    def as_it_is(self) -> Iterator[None]:
        """Let reads inside this context return the current state without waiting."""
        before, self._as_it_is = self._as_it_is, True
        try:
            yield
        finally:
            self._as_it_is = before

    def __getitem__(self, key: Any) -> Any:
        self.settle()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        self.settle()
        return super().__iter__()

    def __reduce__(self) -> Any:
        self.settle()
        return defaultdict, (dict,), None, None, iter(list(super().items()))

    def get(self, *args: Any) -> Any:
        """Wait, then behave as the method of a dict; so do the methods that follow."""
        self.settle()
        return super().get(*args)

    def pop(self, *args: Any) -> Any:  # noqa: D102
        self.settle()
        return super().pop(*args)

    def setdefault(self, *args: Any) -> Any:  # noqa: D102
        self.settle()
        return super().setdefault(*args)

    def keys(self) -> Any:  # noqa: D102
        self.settle()
        return super().keys()

    def values(self) -> Any:  # noqa: D102
        self.settle()
        return super().values()

    def items(self) -> Any:  # noqa: D102
        self.settle()
        return super().items()

    def copy(self) -> Any:
        """Return a plain `defaultdict`."""
        self.settle()
        return defaultdict(dict, super().items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __repr__(self) -> str:
        return repr(self.copy())

    __copy__ = copy


def settle_reads(optimizer: Optimizer, settle: Callable[[], None]) -> None:
    """Make reads of the state of `optimizer` wait from here on, also after a state dict has been loaded."""

    def put(*_: Any) -> None:
        held = optimizer.state
        vars(optimizer)["state"] = SyncedState(dict(dict.items(held)), settle)

    put()
    optimizer.register_load_state_dict_post_hook(put)


@contextmanager
def as_it_is(optimizer: Optimizer) -> Iterator[None]:
    """Let the runtime's own reads of the state of `optimizer` inside this context not wait."""
    state = optimizer.state
    if not isinstance(state, SyncedState):
        yield
        return
    with state.as_it_is():
        yield
