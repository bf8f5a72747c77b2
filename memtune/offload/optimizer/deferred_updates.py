"""Deferred host updates: a step's updates of some blocks run during the next step's forward; exact.

States of a block:

    up to date --take--> deferred --start--> running on the thread --finish--> up to date

`optimizer.step()` passes the host gradients of the deferred blocks and returns. One thread updates the blocks
in the order in which the next forward uses them, with the settings of that step. A read of a block's host
weights waits for that block's update only (`finish`), after which its gradients are freed. Host memory holds
one step's deferred gradients at most: forward uses them all before backward produces others. On fake tensors
the updates begin with the next micro-batch, so that a recorder sees them in the step that they overlap with.

Source: Sun et al. 2022, STRONGHOLD, SC 22, the concurrent optimizers; the choice of the deferred blocks is
memtune's (`offload.core.deferred_updates_plan`).
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
        self._waiting: dict[int, Gradients] = {}  # by block, in the order of use
        # With the gradients, which the update reads: dropping the entry frees them.
        self._running: dict[int, tuple[list[Future[None]], Gradients]] = {}
        self.max_deferred_bytes = 0

    def defer(self, gradients: Gradients) -> Gradients:
        """Move the gradients of the blocks out of `gradients` and return them; their updates are deferred."""
        # The last step's updates must be done: the gradients of one step only may wait.
        self.finish_all()
        for block, hosts in self._blocks.items():
            mine = {host: gradients.pop(host) for host in hosts if host in gradients}
            if mine:
                self._waiting[block] = mine
        taken = {host: gradient for mine in self._waiting.values() for host, gradient in mine.items()}
        self.max_deferred_bytes = max(
            self.max_deferred_bytes, sum(gradient.nbytes for gradient in taken.values())
        )
        return taken

    def start(self, run: Callable[[Gradients, list[Future[None]]], None]) -> None:
        """Start all deferred updates.

        Args:
            run: Updates the keys of its first argument from the values on a thread; appends the futures to
                the second.
        """
        while self._waiting:
            # In the order of use: one thread runs them, and the first block is needed first.
            block = next(iter(self._waiting))
            gradients, futures = self._waiting.pop(block), list[Future[None]]()
            run(gradients, futures)
            if futures:  # none on fake tensors, whose updates run in `run`
                self._running[block] = futures, gradients

    def is_done(self, block: int) -> bool:
        """Return True if `finish` would not wait."""
        return all(each.done() for each in self._running.get(block, ((), {}))[0])

    def unfinished(self) -> list[int]:
        """Return the blocks whose updates wait or run."""
        return [*self._waiting, *self._running]

    def finish(self, block: int) -> None:
        """Wait for the update of `block`; raise the error of a failed one."""
        updates, _ = self._running.pop(block, ((), {}))
        for each in updates:
            each.result()

    def finish_all(self) -> None:
        """Wait for all blocks' updates; raise the error of a failed one."""
        for block in list(self._running):
            self.finish(block)

    @property
    def blocks(self) -> int:
        """Number of blocks deferred in each step."""
        return len(self._blocks)


class SyncedState(defaultdict[Any, Any]):
    """An `optimizer.state` whose reads wait for the updates that are running.

    Args:
        held: The state so far.
        sync: Finishes the updates, so that the state is that of the last step, as in plain training.
    """

    def __init__(self, held: dict[Any, Any], sync: Callable[[], None]) -> None:
        super().__init__(dict, held)
        self._sync, self._without_sync = sync, False

    def sync(self) -> None:
        """Wait for the updates, unless the read is the runtime's own."""
        if not self._without_sync:
            with self.without_sync():
                self._sync()

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        """Let reads inside this context return the state as it is, without waiting."""
        before, self._without_sync = self._without_sync, True
        try:
            yield
        finally:
            self._without_sync = before

    def __getitem__(self, key: Any) -> Any:
        # `optimizer.state[p]` is how schedulers and checkpoints read moments, so each access may have to
        # wait.
        self.sync()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        self.sync()
        return super().__iter__()

    def __reduce__(self) -> Any:
        # As a plain dictionary: a checkpoint must load where memtune is not installed.
        self.sync()
        return defaultdict, (dict,), None, None, iter(list(super().items()))

    def get(self, *args: Any) -> Any:
        """Wait, then behave as the method of a dict; so do the methods that follow."""
        self.sync()
        return super().get(*args)

    def pop(self, *args: Any) -> Any:  # noqa: D102
        self.sync()
        return super().pop(*args)

    def setdefault(self, *args: Any) -> Any:  # noqa: D102
        self.sync()
        return super().setdefault(*args)

    def keys(self) -> Any:  # noqa: D102
        self.sync()
        return super().keys()

    def values(self) -> Any:  # noqa: D102
        self.sync()
        return super().values()

    def items(self) -> Any:  # noqa: D102
        self.sync()
        return super().items()

    def copy(self) -> Any:
        """Return a plain `defaultdict`."""
        self.sync()
        return defaultdict(dict, super().items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __repr__(self) -> str:
        return repr(self.copy())

    __copy__ = copy


def sync_reads(optimizer: Optimizer, sync: Callable[[], None]) -> None:
    """Make reads of the state of `optimizer` wait from here on, also after a state dict has been loaded."""

    def replace_state(*_: Any) -> None:
        # `dict.items`, not the method: it would wait, if the state is a `SyncedState` already.
        vars(optimizer)["state"] = SyncedState(dict(dict.items(optimizer.state)), sync)

    replace_state()
    # `load_state_dict` sets a plain defaultdict.
    optimizer.register_load_state_dict_post_hook(replace_state)


@contextmanager
def without_sync(optimizer: Optimizer) -> Iterator[None]:
    """Let the runtime's own reads of the state of `optimizer` inside this context not wait."""
    state = optimizer.state
    if not isinstance(state, SyncedState):
        yield
        return
    with state.without_sync():
        yield
