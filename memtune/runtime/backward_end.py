"""What is to happen when a backward ends, once for each backward, and what is to be forgotten after one that raised.

torch keeps what is queued with the backward itself and drops both, uncalled, where a backward raises (out of memory, a user's
hook). So what was queued lives exactly as long as its backward may still end: once it is gone without having been called, that
backward has raised. A forward inside of a backward, or a second one before it, finds it alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

from torch.autograd import Variable

from memtune.errors import ApplyError
from memtune.runtime.context import Context

_LOAD = "load the last checkpoint with Tuned.load_state_dict, and go on from there"


class BackwardEnd:
    """Queues `ends` once for each backward.

    Args:
        ends: Called when a backward ends in which `expect` was called.
        raised: Called by the first `settle` or `expect` after such a backward has raised: what it left is to be forgotten.
    """

    def __init__(self, ends: Callable[[], None], raised: Callable[[], None] = lambda: None) -> None:
        self._ends, self._raised = ends, raised
        self._queued: weakref.ref[_Queued] | None = None

    def expect(self) -> bool:
        """Inside a backward: its end is heard of; returns whether this is the first call in it."""
        self.settle()
        if self._queued is not None:
            return False
        queued = _Queued(self._end)
        self._queued = weakref.ref(queued)
        Variable._execution_engine.queue_callback(queued)
        return True

    @property
    def is_near(self) -> bool:
        """Inside a backward in which `expect` was called."""
        return self._queued is not None and self._queued() is not None

    def settle(self) -> None:
        """Forget a backward that has raised, if one has."""
        if self._queued is not None and self._queued() is None:
            self._queued = None
            self._raised()

    def _end(self) -> None:
        self._queued = None
        self._ends()


class _Queued:
    """A call that nobody but torch's backward holds."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


class EarlyUpdated:
    """What has been updated before `optimizer.step()`, which cannot be taken back: until it ends the step, or state is loaded.

    Args:
        context: Of the model.
        what: Its name in the singular, for messages.
    """

    def __init__(self, context: Context, what: str) -> None:
        self._what, self._updated, self._raised = what, set[Hashable](), False
        context.reloaded.append(self.forget)

    def add(self, updated: Iterable[Hashable]) -> None:
        """These are updated from here on."""
        self._updated.update(updated)

    def raised(self) -> None:
        """The step's backward has raised."""
        self._raised = bool(self._updated)

    def step_goes_on(self) -> None:
        """Refuse to go on with a step whose backward has raised after updates.

        Raises:
            ApplyError: It has.
        """
        if self._raised:
            self.step_begins()

    def step_begins(self) -> None:
        """Refuse to begin a step while one has been begun.

        Raises:
            ApplyError: One has.
        """
        if self._updated:
            raise never_ended(len(self._updated), self._what, _LOAD)

    def forget(self) -> None:
        """`optimizer.step()` ends the step, or what was updated has been replaced."""
        self._updated.clear()
        self._raised = False


class HalfDone:
    """Whether an optimizer's step has raised between its first update and its last: further steps would begin with a mixture.

    Args:
        context: Of the model; what is loaded there replaces the mixture.
    """

    def __init__(self, context: Context) -> None:
        self.is_it = False
        context.reloaded.append(self.forget)

    def forget(self) -> None:
        """All weights and all state are replaced."""
        self.is_it = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Around all updates of a step, which are done as a whole; raises as `refuse` does."""
        self.refuse()
        try:
            yield
        except BaseException:
            self.is_it = True
            raise

    def refuse(self) -> None:
        """Before anything of the next step is done.

        Raises:
            ApplyError: It has.
        """
        if self.is_it:
            raise ApplyError(
                "optimizer.step() raised in the middle of an update.",
                evidence="Some weights, or their state, are updated and others are not, which cannot be taken back.",
                fix=_LOAD, code="MT368",
            )  # fmt: skip


def never_ended(n_updated: int, what: str, fix: str) -> ApplyError:
    """A step that has updated `n_updated` of `what`, in the singular, inside a backward, and went no further."""
    evidence = f"{n_updated} {what}{'s were' if n_updated > 1 else ' was'} updated inside backward, which cannot be taken back."
    return ApplyError("A step was begun and optimizer.step() did not end it.", evidence=evidence, fix=fix, code="MT368")
