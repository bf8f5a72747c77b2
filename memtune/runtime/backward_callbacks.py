"""Callbacks at the end of each backward, once per backward, and clean-up after a backward that raised.

The autograd engine keeps queued callbacks with the running backward and drops them, uncalled, if it raises
(out of memory, a user's hook). A queued callback therefore lives exactly as long as its backward may still
end: if it is freed without having been called, that backward has raised. A nested forward, or a second
forward before the backward, finds it alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

from torch.autograd import Variable

from memtune.errors import ApplyError
from memtune.runtime.context import Context

_LOAD = "load the last checkpoint with Tuned.load_state_dict, and continue from there"


class BackwardEnd:
    """Queue of a callback for the end of each backward.

    Args:
        ends: Called at the end of each backward in which `expect` was called.
        raised: Called by the first `settle` or `expect` after such a backward has raised, to drop its state.
    """

    def __init__(self, ends: Callable[[], None], raised: Callable[[], None] = lambda: None) -> None:
        self._ends, self._raised = ends, raised
        self._queued: weakref.ref[_Queued] | None = None

    def expect(self) -> bool:
        """Queue the callback for the running backward; return True for the first call in this backward."""
        # A dead reference to an earlier backward would look like a callback that is already queued.
        self.settle()
        if self._queued is not None:
            return False
        queued = _Queued(self._end)
        self._queued = weakref.ref(queued)  # weak: only the engine may keep it alive
        Variable._execution_engine.queue_callback(queued)
        return True

    @property
    def is_near(self) -> bool:
        """Return True inside a backward in which `expect` was called."""
        return self._queued is not None and self._queued() is not None

    def settle(self) -> None:
        """Call `raised` if the last expected backward has raised."""
        if self._queued is not None and self._queued() is None:
            self._queued = None
            self._raised()

    def _end(self) -> None:
        self._queued = None
        self._ends()


class _Queued:
    """Callback that only the autograd engine references."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


class EarlyUpdates:
    """Updates made before `optimizer.step()`, which cannot be undone; tracked until that call or a loaded
    state ends the step.

    Args:
        context: Context of the model.
        what: Name of an updated thing in the singular, for messages.
    """

    def __init__(self, context: Context, what: str) -> None:
        self._what, self._updated, self._raised = what, set[Hashable](), False
        context.events.weights_loaded.subscribe(self.forget)

    def add(self, updated: Iterable[Hashable]) -> None:
        """Record that these are updated."""
        self._updated.update(updated)

    def raised(self) -> None:
        """Record that the step's backward has raised."""
        # Without updates the step may simply be repeated, as in the plain loop.
        self._raised = bool(self._updated)

    def step_goes_on(self) -> None:
        """Refuse to continue a step whose backward has raised after updates.

        Raises:
            ApplyError: The backward raised after updates.
        """
        if self._raised:
            self.step_begins()

    def step_begins(self) -> None:
        """Refuse to begin a step while an earlier one is open.

        Raises:
            ApplyError: An earlier step has updates and was not ended.
        """
        if self._updated:
            raise unfinished_step_error(len(self._updated), self._what, _LOAD)

    def forget(self) -> None:
        """Clear the record: `optimizer.step()` has ended the step, or a loaded state replaces the updates."""
        self._updated.clear()
        self._raised = False


class PartialStep:
    """Tracker of an optimizer step that raised between its first and its last update.

    Later steps would start from partly updated weights.

    Args:
        context: Context of the model; loading weights there clears the flag.
    """

    def __init__(self, context: Context) -> None:
        self.is_it = False
        context.events.weights_loaded.subscribe(self.forget)

    def forget(self) -> None:
        """Clear the flag: all weights and all state are replaced."""
        self.is_it = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Wrap all updates of a step; an exception inside leaves the step partial.

        Raises:
            ApplyError: An earlier step is partial.
        """
        self.refuse()
        try:
            yield
        except BaseException:
            self.is_it = True
            raise

    def refuse(self) -> None:
        """Refuse to start the next step after a partial one.

        Raises:
            ApplyError: An earlier step is partial.
        """
        if self.is_it:
            raise ApplyError(
                "optimizer.step() raised in the middle of an update.",
                evidence=(
                    "Some weights, or their state, are updated and others are not, which cannot be undone."
                ),
                fix=_LOAD,
                code="MT368",
            )


def unfinished_step_error(n_updated: int, what: str, fix: str) -> ApplyError:
    """Return the error of a step that updated `n_updated` of `what` (singular) inside backward and was never
    ended.
    """
    evidence = (
        f"{n_updated} {what}{'s were' if n_updated > 1 else ' was'} updated inside backward, which cannot be"
        " undone."
    )
    return ApplyError(
        "A step was begun and optimizer.step() did not end it.", evidence=evidence, fix=fix, code="MT368"
    )
